"""Keeps what is done again and again to a small share of a run's time."""

from __future__ import annotations

_RESTS = 10  # times as long as it took, it is not done again


class Throttle:
    """Says when something may be done again, from how long it took the last time.

    It rests ten times as long, so that it takes less than a tenth of the time. Times
    are of any clock that does not go back, in seconds.
    """

    def __init__(self) -> None:
        self._due_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Tell whether it may be done now; the first time always."""
        return now_s >= self._due_s

    def note(self, began_s: float, ended_s: float) -> None:
        """Note that it was done."""
        self._due_s = ended_s + _RESTS * (ended_s - began_s)
