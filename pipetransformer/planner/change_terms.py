"""What the price of a change depends on besides the plans: one value, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipetransformer.core import wire
from pipetransformer.planner.pauses import PauseModel

RESHAPE_MODES = ("priced", "always", "never")


@dataclass(frozen=True, kw_only=True)
class ChangeTerms:
    """What `replan` prices a change by; it takes them one by one as well.

    Args:
        remaining_steps: steps, as plans count them, until the boundary changes again
            if that is known, else until the end.
        pace: wall time of steps so far over their simulated time: pauses are wall
            time, so what a step saves is multiplied by it; thousandths count.
        pauses: what changes have taken so far; the default predicts all of it.
        elapsed_since_last_ns: time since K or R changed last; None: never.
        hysteresis: what a gain must exceed its price by; thousandths count.
        reshape: ``"priced"``; ``"always"``: whenever a step gets 2 % shorter, without
            a price or a look at devices that hold both plans; ``"never"``: only when
            the plan in force cannot go on.
        factors: what steps took over what is simulated, by `Candidate.name`, against
            those of names that are not in it; of a `Trial`.

    Raises:
        ValueError: a field is malformed; the text names it.
    """

    remaining_steps: int
    pace: float = 1.0
    pauses: PauseModel = PauseModel()
    elapsed_since_last_ns: int | None = None
    hysteresis: float = 0.25
    reshape: str = "priced"
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field."""
        wire.check_int(self.remaining_steps, "remaining_steps")
        if self.elapsed_since_last_ns is not None:
            wire.check_int(self.elapsed_since_last_ns, "elapsed_since_last_ns")
        for name in ("pace", "hysteresis"):
            factor = wire.check_float(getattr(self, name), name)
            if factor > 1000:
                raise ValueError(f"{name}: expected at most 1000, got {factor}")
        wire.check_choice(self.reshape, "reshape", RESHAPE_MODES)
        for name, factor in self.factors.items():
            wire.check_float(factor, f"factor of {name}")

    @property
    def pace_permille(self) -> int:
        """The pace in thousandths."""
        return round(self.pace * 1000)

    @property
    def hysteresis_permille(self) -> int:
        """The hysteresis in thousandths."""
        return round(self.hysteresis * 1000)
