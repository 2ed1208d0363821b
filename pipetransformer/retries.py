"""After ABORT: whether to try again, and without whom. Decisions, no effects."""

from __future__ import annotations

from collections.abc import Collection

MOST_RETRIES = 3
"""Attempts after the first one."""

_BACK_OFF_S = 0.1


def left_out(
    absent: Collection[int],
    culprits: Collection[int],
    *,
    holders: Collection[int],
    attempt: int,
) -> tuple[int, ...] | None:
    """Return the ranks without which the change is tried again.

    Args:
        absent: The ranks without which it was tried.
        culprits: Who did not come, or refused; may be empty, when nobody knows.
        holders: The ranks that hold the training state.
        attempt: Number of the attempt that was aborted, from 0.

    Returns:
        World ranks, ascending; None: give up, the old plan goes on.
    """
    if attempt >= MOST_RETRIES:
        return None
    without = {*absent, *culprits}
    return tuple(sorted(without)) if set(holders) - without else None


def back_off_s(attempt: int) -> float:
    """Return how long to wait after the aborted attempt `attempt`, in seconds."""
    return _BACK_OFF_S * (attempt + 1)
