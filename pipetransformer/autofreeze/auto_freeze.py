"""AutoFreeze's rule: freeze the front layers whose gradient norms have settled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipetransformer.autofreeze.policy import (
    FreezeStatistics,
    Policy,
    Progress,
    State,
    check_count,
)


class AutoFreeze(Policy):
    """Freezes the front units whose gradient norms change less than most.

    With n the L1 norm of a unit's accumulated gradient, its change is
    ``|n_before - n| / n_before``. The units before the first one whose change reaches
    the given percentile of all active units' changes freeze. Points 0 and 1 only
    measure. At least one unit stays active, and nothing unfreezes.

    Where all layers change alike, as when the learning rate falls, the percentile ranks
    noise: prefer ``Guarded``.

    Args:
        percentile: of the changes of active units, in [0, 100], with linear
            interpolation between two of them.
        dry_run: log what would be frozen, freeze nothing.

    Raises:
        TypeError: a percentile that is no number.
        ValueError: a percentile out of range.

    Source: AutoFreeze (Liu et al., 2021), section 3; its released copy freezes one unit
    more.
    """

    needs = frozenset({"gradient_l1"})

    def __init__(self, percentile: float = 50.0, *, dry_run: bool = False) -> None:
        super().__init__(dry_run=dry_run)
        if isinstance(percentile, bool) or not isinstance(percentile, (int, float)):
            raise TypeError(f"percentile: expected a number, got {percentile!r}")
        if not 0.0 <= percentile <= 100.0:
            raise ValueError(
                f"percentile: expected a number in [0, 100], got {percentile}"
            )
        self._percentile = float(percentile)
        self._point = 0
        self._num_frozen = 0
        self._norms: list[float] = []
        self._told = ""

    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int:
        if progress.epoch <= self._point:
            return self._num_frozen
        norms, first = stats.gradient_l1, self._num_frozen
        finite = self._all_finite("gradient_l1", norms, first, progress)
        self._point = progress.epoch
        if not finite:
            self._told = "a gradient norm is no finite number"
            return self._num_frozen
        norms = norms or ()
        before, self._norms = self._norms, list(norms)
        if not before:
            self._told = "changes are known from the next point on"
            return self._num_frozen
        changes = [
            _change(a, b) for a, b in zip(before[first:], norms[first:], strict=True)
        ]
        if changes:
            bound = percentile_of(changes, self._percentile)
            self._num_frozen += next(
                unit for unit, change in enumerate(changes) if change >= bound
            )
            self._told = (
                f"unit {self._num_frozen} is the first whose gradient norm changed by "
                f"{bound:.3g} or more"
            )
        return self._num_frozen

    def _why(self) -> str:
        return self._told

    def _begin(self) -> None:
        self._num_frozen = self.starting_units

    def _get_settings(self) -> dict[str, object]:
        return {"percentile": self._percentile}

    def _get_state(self) -> State:
        return {
            "point": self._point,
            "num_frozen": self._num_frozen,
            "norms": list(self._norms),
        }

    def _set_state(self, state: State) -> None:
        norms = state["norms"]
        if (
            not isinstance(norms, list)
            or len(norms) not in (0, self.num_units)
            or not all(isinstance(norm, float) for norm in norms)
        ):
            raise ValueError(
                f"policy state norms: expected {self.num_units} numbers or none, got "
                f"{norms!r}"
            )
        point = check_count("policy state point", state["point"])
        self._num_frozen = check_count(
            "policy state num_frozen", state["num_frozen"], self.num_units
        )
        self._point, self._norms = point, list(norms)


def _change(before: float, now: float) -> float:
    """Return the relative change; from nothing to something it is infinite."""
    if before == 0.0:
        return 0.0 if now == 0.0 else math.inf
    return abs(before - now) / before


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """Return a percentile with linear interpolation.

    Args:
        values: at least one; may be infinite.
        percentile: in [0, 100].
    """
    ordered = sorted(values)
    place = percentile / 100.0 * (len(ordered) - 1)
    low = math.floor(place)
    share = place - low
    if share == 0.0 or ordered[low] == ordered[low + 1]:
        return ordered[low]
    return ordered[low] + share * (ordered[low + 1] - ordered[low])
