"""Stands for ``torchgpipe.balance.blockpartition``."""

from pipetransformer.pipe.balance.blockpartition import solve

__all__ = ["solve"]
