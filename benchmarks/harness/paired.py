"""Paired non-inferiority: is one system's accuracy not lower than another's?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scipy import stats

MARGIN_POINTS = 0.3
CONFIDENCE = 0.95


@dataclass(frozen=True)
class NonInferiority:
    """One-sided test on paired differences, in points of accuracy.

    Attributes:
        differences: First minus second system, one per seed.
        mean: Their mean.
        lower_limit: One-sided lower confidence limit of the mean.
        margin: How much lower the first system may be.
        passes: Whether the lower limit lies above minus the margin.
    """

    differences: tuple[float, ...]
    mean: float
    lower_limit: float
    margin: float
    passes: bool

    def __str__(self) -> str:
        """Return mean, limit, margin and verdict."""
        return (
            f"mean {self.mean:+.2f} points over {len(self.differences)} seeds, "
            f"one-sided 95 % lower limit {self.lower_limit:+.2f}, "
            f"margin {self.margin}: {'passes' if self.passes else 'fails'}"
        )

    def to_json(self) -> dict[str, object]:
        """Return all fields, the differences as a list."""
        return {**asdict(self), "differences": list(self.differences)}


def non_inferiority(
    first: Sequence[float],
    second: Sequence[float],
    *,
    margin: float = MARGIN_POINTS,
) -> NonInferiority:
    """Test whether `first` is not lower than `second` by more than `margin`.

    Args:
        first: Accuracy per seed in percent.
        second: Accuracy of the same seeds.
        margin: In points, positive.

    Raises:
        ValueError: fewer than two pairs, or sequences of different lengths.

    Source: one-sided paired t-interval.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(
            "seeds: expected two sequences of the same length >= 2, got "
            f"{len(first)} and {len(second)}"
        )
    differences = tuple(a - b for a, b in zip(first, second, strict=True))
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    quantile = float(stats.t.ppf(CONFIDENCE, df=len(differences) - 1))
    lower = mean - quantile * error
    return NonInferiority(differences, mean, lower, margin, lower > -margin)
