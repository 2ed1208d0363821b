"""Numbers everything in which the active ranks meet.

A training step, the end of a pass, an evaluation, a change of plan: each is one
operation, and each contains a collective of all active ranks. So two active ranks
never differ by more than one operation, and after a failure the number alone tells
who is ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Operations:
    """Counts the operations that this rank has completed.

    Attributes:
        done: How many.
        result: What the last one gave, as plain values that survive JSON; None where
            each rank keeps its own.
    """

    def __init__(self) -> None:
        self.done = 0
        self.result: object = None

    def run(self, body: Callable[[], T], *, shared: bool = True) -> T:
        """Run one operation, and count it once it is complete.

        Args:
            body: Meets the other active ranks; changes nothing that a second run of
                it would find changed.
            shared: Whether every rank gets the same result, which is then remembered.
        """
        result = body()
        self.done += 1
        self.result = result if shared else None
        return result
