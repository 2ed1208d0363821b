"""Balancing: how many layers each stage should get."""

from pipetransformer.pipe.balance.functions import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
