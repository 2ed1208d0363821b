"""The pipeline alone: models, rivals, bounds."""
