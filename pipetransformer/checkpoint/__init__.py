"""A run as a file: format, what a run adds, when it is written."""

from pipetransformer.checkpoint.format import export_checkpoint

__all__ = ["export_checkpoint"]
