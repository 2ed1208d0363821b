"""Stands for ``torchgpipe.balance``."""

from pipetransformer.compat.torchgpipe.balance.functions import (
    balance_by_size,
    balance_by_time,
)

__all__ = ["balance_by_size", "balance_by_time"]
