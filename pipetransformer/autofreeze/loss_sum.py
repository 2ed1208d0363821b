"""Sums the training loss over an interval, of one replica and then of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable


class LossSum:
    """The training loss between two evaluation points.

    Each replica adds its own rows. Before a decision the replicas exchange their sums,
    so that all of them decide by the same number. Not thread-safe.
    """

    def __init__(self) -> None:
        self._own = (0.0, 0.0)
        self._last: tuple[Callable[[], float], float] | None = None
        self._mean: float | None = None

    def add(self, loss: Callable[[], float], weight: float) -> None:
        """Add a step of this replica.

        Args:
            loss: Gives the mean over its rows; called when the next one is added, or
                the sum is asked for.
            weight: What it is the mean of: rows, or what ``loss_weight`` counts.
        """
        self._take_in()
        self._last = loss, weight

    def _take_in(self) -> None:
        if self._last is not None:
            (loss, weight), (total, weights) = self._last, self._own
            self._own = total + loss() * weight, weights + weight
            self._last = None

    @property
    def own(self) -> tuple[float, float]:
        """Sum of this replica's losses times weights, and of its weights."""
        self._take_in()
        return self._own

    def load(self, total: float, weight: float) -> None:
        """Take over `own` of a checkpoint."""
        self._own, self._last = (total, weight), None

    def settle(self, parts: Iterable[tuple[float, float]]) -> float | None:
        """Take in `own` of every replica, in the same order on all; return the mean."""
        pairs = list(parts)
        weight = math.fsum(weight for _, weight in pairs)
        total = math.fsum(total for total, _ in pairs)
        self.know(total / weight if weight else None)
        return self._mean

    def settle_alone(self) -> None:
        """Take in `own` if nothing was settled: a checkpoint of this point gave it."""
        if self._mean is None:
            self.settle([self.own])

    def gather(self, parts: Iterable[tuple[float, float]], *, keeps: bool) -> None:
        """Take in `own` of every replica where their number may change.

        Args:
            parts: In the same order on all.
            keeps: On one of them, which goes on with the sum; the others begin anew.
        """
        pairs = list(parts) if keeps else []
        self._last = None
        self._own = math.fsum(p[0] for p in pairs), math.fsum(p[1] for p in pairs)

    def know(self, mean: float | None) -> None:
        """Take over the mean from a rank that has settled it."""
        self._mean = mean

    def take(self) -> float | None:
        """Return the mean over all replicas, and begin anew; None: of nothing."""
        mean, self._mean = self._mean, None
        self._own, self._last = (0.0, 0.0), None
        return mean
