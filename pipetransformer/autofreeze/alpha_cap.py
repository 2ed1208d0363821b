"""The paper's rule: freeze at most a fixed share of what is still active."""

from __future__ import annotations

from pipetransformer import _C
from pipetransformer.autofreeze.policy import (
    FreezeStatistics,
    Policy,
    Progress,
    State,
    check_count,
)

# A change further ahead than this is as good as none.
_POINTS_AHEAD = 1000


class AlphaCap(Policy):
    """Freezes up to the share `alpha` of the active units at every evaluation point.

    The cap alone (``gradient_term=False``) freezes ``ceil(L * (1 - (1 - alpha) ** T))``
    of L units at point T: 0 4 7 9 10 11 11 12 for L = 12 and alpha = 1/3. Point 0,
    before training, freezes nothing. Units before the first trainable parameter count
    as frozen from there on. Points are taken in order; asking for one again repeats its
    answer.

    Args:
        alpha: freeze_alpha, in [0, 1); the paper and the demo take 1/3.
        gradient_term: freeze no further than the active unit with the smallest
            gradient norm, as the paper's rule has it. Needs gradient norms; without
            them a point is refused. False: the cap alone, which knows nothing of the
            model.
        min_active: units that stay active whatever the cap says.
        dry_run: log what would be frozen, freeze nothing.

    Raises:
        TypeError: an alpha that is no number.
        ValueError: an alpha outside [0, 1), or a negative min_active; one above the
            number of units is found in ``bind``.

    Source: paper section 3.1, equation 1.
    """

    def __init__(
        self,
        alpha: float,
        *,
        gradient_term: bool = True,
        min_active: int = 0,
        dry_run: bool = False,
    ) -> None:
        super().__init__(dry_run=dry_run)
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise TypeError(f"alpha: expected a number in [0, 1), got {alpha!r}")
        _C.autofreeze.check_alpha(alpha)
        self._alpha = float(alpha)
        self._min_active = check_count("min_active", min_active)
        if gradient_term:
            self.needs = frozenset({"gradient_norms"})
        self._told = ""
        self._point = 0
        self._frozen = 0.0
        self._num_frozen = 0

    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int:
        if progress.epoch <= self._point:
            return self._num_frozen
        norms: tuple[float, ...] = ()
        if self.needs:
            given = stats.gradient_norms
            if not self._all_finite(
                "gradient_norms", given, self._num_frozen, progress
            ):
                self._point = progress.epoch
                self._told = "a gradient norm is no finite number"
                return self._num_frozen
            norms = given or ()
        self._frozen, self._num_frozen = _C.autofreeze.alpha_cap_advance(
            alpha=self._alpha,
            num_units=self.num_units,
            min_active=self._min_active,
            frozen=self._frozen,
            num_frozen=self._num_frozen,
            gradient_norms=norms,
        )
        self._point = progress.epoch
        self._told = self._tell(norms)
        return self._num_frozen

    def _why(self) -> str:
        return self._told

    def _tell(self, norms: tuple[float, ...]) -> str:
        rounded = "" if f"{self._frozen:.4g}".isdigit() else ", rounded up"
        if not norms:
            return f"the cap stands at {self._frozen:.4g} units{rounded}"
        return f"cap and smallest gradient norm allow {self._frozen:.4g} units{rounded}"

    def _find_change(self, progress: Progress) -> int | None:
        """Let the cap alone go on; what gradients will say nobody knows."""
        if self.needs or self._num_frozen == self.num_units:
            return None
        frozen, num_frozen = self._frozen, self._num_frozen
        first = max(self._point, progress.epoch) + 1
        for point in range(first, first + _POINTS_AHEAD):
            frozen, num_frozen = _C.autofreeze.alpha_cap_advance(
                alpha=self._alpha,
                num_units=self.num_units,
                min_active=self._min_active,
                frozen=frozen,
                num_frozen=num_frozen,
                gradient_norms=(),
            )
            if num_frozen != self._num_frozen:
                return point
        return None

    def _begin(self) -> None:
        self._frozen, self._num_frozen = float(self.starting_units), self.starting_units

    def _get_settings(self) -> dict[str, object]:
        return {
            "alpha": self._alpha,
            "gradient_term": bool(self.needs),
            "min_active": self._min_active,
        }

    def _check_units(self, num_units: int) -> None:
        check_count("min_active", self._min_active, num_units)

    def _get_state(self) -> State:
        return {
            "frozen": self._frozen,
            "num_frozen": self._num_frozen,
            "point": self._point,
        }

    def _set_state(self, state: State) -> None:
        frozen = state["frozen"]
        if isinstance(frozen, bool) or not isinstance(frozen, (int, float)):
            raise TypeError(f"policy state frozen: expected a number, got {frozen!r}")
        if not 0.0 <= frozen <= self.num_units:
            raise ValueError(
                f"policy state frozen: expected a number in [0, {self.num_units}], "
                f"got {frozen}"
            )
        self._num_frozen = check_count(
            "policy state num_frozen", state["num_frozen"], self.num_units
        )
        self._point = check_count("policy state point", state["point"])
        self._frozen = float(frozen)
