"""Stands for ``torch.distributed.pipeline``."""

from pipetransformer.compat.pipeline import sync

__all__ = ["sync"]
