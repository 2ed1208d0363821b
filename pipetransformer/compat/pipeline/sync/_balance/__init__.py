"""Stands for ``torch.distributed.pipeline.sync._balance``."""

from pipetransformer.pipe.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
