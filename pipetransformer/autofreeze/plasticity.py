"""Egeria's rule: freeze the front units whose activations have stopped changing."""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.autofreeze.policy import (
    FreezeStatistics,
    Policy,
    Progress,
    State,
    check_count,
)

_LR_DROP = 10.0  # of the learning rate since a freeze, that thaws
_LEAST_WINDOW = 2


class Plasticity(Policy):
    """Freezes the front units whose plasticity has levelled off.

    At each evaluation point the engine runs a fixed batch of at most 32 training
    samples through the model, in eval mode. A unit's plasticity is how far the
    samples' similarities by its outputs have come since the point before. It is
    averaged over `window` points; where the slope of a line through as many of these
    averages is at most `tolerance` times the steepest that the unit has had, at
    `patience` points in a row, the unit freezes if all before it are frozen. At least
    one unit stays active. When the learning rate has fallen to a tenth of what it was
    at the last freeze, all units thaw, and windows are half as long from then on.

    A run that resumes compares from its second point on, one on accelerators from
    point 2 on: before the first plan the layers are not where they will compute.

    Args:
        window: points that count, at least 2.
        tolerance: share of the steepest slope, in (0, 1).
        patience: points in a row, at least 1.
        dry_run: log what would be frozen, freeze nothing.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument out of range.

    Source: Egeria (Wang et al., EuroSys 2023), section 4; it compares with a quantised
    snapshot of the weights that is renewed now and then, and freezes one layer at a
    time.
    """

    needs = frozenset({"plasticity"})

    def __init__(
        self,
        *,
        window: int = 3,
        tolerance: float = 0.2,
        patience: int = 2,
        dry_run: bool = False,
    ) -> None:
        super().__init__(dry_run=dry_run)
        check_count("window", window)
        check_count("patience", patience)
        if window < _LEAST_WINDOW:
            raise ValueError(f"window: expected at least {_LEAST_WINDOW}, got {window}")
        if patience < 1:
            raise ValueError(f"patience: expected at least 1, got {patience}")
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
            raise TypeError(f"tolerance: expected a number, got {tolerance!r}")
        if not 0.0 < tolerance < 1.0:
            raise ValueError(f"tolerance: expected a number in (0, 1), got {tolerance}")
        self._settings: tuple[int, float, int] = window, float(tolerance), patience
        self._window = window
        self._point = 0
        self._num_frozen = 0
        self._rate = 0.0  # learning rate at the last freeze; 0: there was none
        self._values: list[list[float]] = []  # by point, of the last ones
        self._steepest: list[float] = []
        self._settled: list[float] = []  # points in a row
        self._told = ""

    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int:
        if progress.epoch <= self._point:
            return self._num_frozen
        self._point = progress.epoch
        rate = progress.learning_rate
        if rate is not None and 0.0 < rate * _LR_DROP <= self._rate * (1 + 1e-9):
            self._thaw(rate)
            return self._num_frozen
        values = stats.plasticity
        if values is None:
            self._told = "nothing to compare with yet"
            return self._num_frozen
        if not self._all_finite("plasticity", values, self._num_frozen, progress):
            self._told = "a plasticity is no finite number"
            return self._num_frozen
        self._values = [*self._values, list(values)][-(2 * self._window - 1) :]
        if len(self._values) < self._window:
            self._told = f"slopes are known from {self._window} comparisons on"
            return self._num_frozen
        self._judge(rate)
        return self._num_frozen

    def _judge(self, rate: float | None) -> None:
        _, tolerance, patience = self._settings
        by_unit = zip(*self._values, strict=True)
        slopes = [abs(slope_of(averaged(v, self._window))) for v in by_unit]
        first = self._num_frozen
        for unit in range(first, self.num_units):
            self._steepest[unit] = max(self._steepest[unit], slopes[unit])
            level = slopes[unit] <= tolerance * self._steepest[unit]
            self._settled[unit] = self._settled[unit] + 1 if level else 0.0
        while (
            self._num_frozen < self.num_units - 1
            and self._settled[self._num_frozen] >= patience
        ):
            self._num_frozen += 1
        if self._num_frozen > first:
            self._rate = rate or 0.0
        unit = min(self._num_frozen, self.num_units - 1)
        steepest = self._steepest[unit]
        share = slopes[unit] / steepest if steepest > 0 else 0.0
        self._told = (
            f"unit {unit} changes at {share:.2f} of its steepest slope (level: at most "
            f"{tolerance:g}, {self._settled[unit]:.0f} of {patience} points)"
        )

    def _thaw(self, rate: float) -> None:
        self._window = max(_LEAST_WINDOW, self._window // 2)
        self._told = (
            f"the learning rate fell from {self._rate:g} to {rate:g} since the last "
            "freeze: all units thaw"
        )
        self._begin()

    def _why(self) -> str:
        return self._told

    def _begin(self) -> None:
        self._num_frozen = self.starting_units
        self._rate = 0.0
        self._values = []
        self._steepest = [0.0] * self.num_units
        self._settled = [0.0] * self.num_units

    def _get_settings(self) -> dict[str, object]:
        window, tolerance, patience = self._settings
        return {"window": window, "tolerance": tolerance, "patience": patience}

    def _get_state(self) -> State:
        return {
            "point": self._point,
            "num_frozen": self._num_frozen,
            "window": self._window,
            "rate": self._rate,
            "values": [value for point in self._values for value in point],
            "steepest": list(self._steepest),
            "settled": list(self._settled),
        }

    def _set_state(self, state: State) -> None:
        units = self.num_units
        lists = {
            name: _numbers(name, state[name])
            for name in ("values", "steepest", "settled")
        }
        window = check_count("policy state window", state["window"], self._settings[0])
        points, rest = divmod(len(lists["values"]), units) if units else (0, 0)
        if rest or points > 2 * window - 1:
            raise ValueError(
                f"policy state values: expected {units} for each of at most "
                f"{2 * window - 1} points, got {len(lists['values'])}"
            )
        for name in ("steepest", "settled"):
            if len(lists[name]) != units:
                raise ValueError(
                    f"policy state {name}: expected {units} numbers, got "
                    f"{len(lists[name])}"
                )
        rate = _numbers("rate", [state["rate"]])[0]
        point = check_count("policy state point", state["point"])
        self._num_frozen = check_count(
            "policy state num_frozen", state["num_frozen"], units
        )
        self._point, self._window, self._rate = point, window, rate
        flat = lists["values"]
        self._values = [flat[k * units : (k + 1) * units] for k in range(points)]
        self._steepest, self._settled = lists["steepest"], lists["settled"]


def _numbers(name: str, values: object) -> list[float]:
    if not isinstance(values, list) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool)
        for value in values
    ):
        raise ValueError(f"policy state {name}: expected numbers, got {values!r}")
    return [float(value) for value in values]


def averaged(values: Sequence[float], window: int) -> list[float]:
    """Return the last `window` moving averages, each over as many values or fewer.

    Args:
        values: at least `window`.
        window: at least 1.
    """
    ends = range(len(values) - window + 1, len(values) + 1)
    parts = [values[max(0, end - window) : end] for end in ends]
    return [sum(part) / len(part) for part in parts]


def slope_of(values: Sequence[float]) -> float:
    """Return the slope of the line through equally distant values, least squares.

    Args:
        values: at least two.
    """
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    above = sum((k - middle) * (value - mean) for k, value in enumerate(values))
    below = sum((k - middle) ** 2 for k in range(len(values)))
    return above / below
