"""How many bytes a record takes, how many records a budget holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipetransformer import _C

_DISK_BLOCK_BYTES = 4096


def slots_within(budget_bytes: int, *, num_samples: int, slot_bytes: int) -> int:
    """Return how many records `ActivationCache.create` would reserve; 0: it refuses.

    Args:
        budget_bytes: of the whole cache.
        num_samples: ids are ``0 .. num_samples - 1``.
        slot_bytes: bytes of the largest record, see `record_bytes`.
    """
    return _C.autocache.slots_within(
        budget_bytes, num_samples=num_samples, slot_bytes=slot_bytes
    )


def least_budget(num_samples: int, slot_bytes: int) -> int:
    """Return a budget for a slot or a few more; otherwise as `slots_within`."""
    budget = slot_bytes
    while slots_within(budget, num_samples=num_samples, slot_bytes=slot_bytes) == 0:
        budget += max(1, budget // 8)
    return budget


def bytes_on_disk(record_bytes: int) -> int:
    """Return what a record of that many bytes takes on disk: whole blocks."""
    return -(-record_bytes // _DISK_BLOCK_BYTES) * _DISK_BLOCK_BYTES


def record_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the slot size that one row of each of `tensors` needs.

    Args:
        tensors: what crosses a boundary, each ``(rows, ...)`` with at least one row.

    Raises:
        ValueError: if a tensor has no row.
    """
    return _C.autocache.record_bytes(list(tensors))
