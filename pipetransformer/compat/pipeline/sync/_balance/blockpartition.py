"""Stands for ``torch.distributed.pipeline.sync._balance.blockpartition``."""

from pipetransformer.pipe.balance.blockpartition import solve

__all__ = ["solve"]
