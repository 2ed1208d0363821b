"""Stands for ``torchgpipe.gpipe``."""

from pipetransformer.pipe.gpipe import GPipe, verify_module

__all__ = ["GPipe", "verify_module"]
