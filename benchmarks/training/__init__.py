"""Whole fine-tuning runs, with the engine and without it."""
