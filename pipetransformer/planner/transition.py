"""What a change of plan costs and gains, and the rule that decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from pipetransformer.core import wire
from pipetransformer.planner.pauses import TERMS

TRANSITION_KINDS = ("none", "boundary", "cuts", "shape")


@dataclass(frozen=True, kw_only=True)
class Transition:
    """The price of the best other plan, and whether it was paid.

    A new boundary is no matter of price: frozen layers stop training when the policy
    says so. What is priced is the change beyond it, against the plan in force at the
    new boundary.

    Args:
        kind: what was priced: ``"none"`` (nothing changes), ``"boundary"`` (only the
            frozen layers), ``"cuts"`` (same K and R, other cuts, M or schedule) or
            ``"shape"`` (another K or R).
        offered: the plan that was priced, in one line.
        terms_ns: predicted pause of that change by term, ns: ``prepare`` (agreement,
            with a group switch for a shape), ``move`` (weights and moments with a new
            owner, over their link), ``rewire`` (stages, pipeline, DDP),
            ``first_step`` (what it takes more than the others), ``cache`` (what must
            be read again).
        anyway_terms_ns: the same for the boundary change alone, which is made in any
            case; empty when the boundary stays.
        pause_ns: sum of ``terms_ns``, at most 2**62.
        gain_ns_per_step: simulated step of the plan in force at this boundary minus
            that of the offered plan, times the pace; 0 when the plan in force cannot
            go on.
        pace_permille: wall time of steps so far over their simulated time, in
            thousandths.
        remaining_steps: steps, as plans count them, for which the gain lasts.
        pay_back_steps: steps after which the pause beyond ``anyway_terms_ns`` is paid
            back; None where nothing is gained.
        accepted: whether the offered plan was taken.
        rule: the rule that decided, as a sentence with its numbers.
        moved_bytes: weights and moments handed to new replicas.

    Raises:
        ValueError: a field is malformed; the text names it.
    """

    kind: str
    offered: str = ""
    terms_ns: Mapping[str, int] = field(default_factory=dict)
    anyway_terms_ns: Mapping[str, int] = field(default_factory=dict)
    pause_ns: int = 0
    gain_ns_per_step: int = 0
    pace_permille: int = 1000
    remaining_steps: int = 0
    pay_back_steps: int | None = None
    accepted: bool = True
    rule: str = ""
    moved_bytes: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        what = "transition"
        wire.check_choice(self.kind, f"{what} kind", TRANSITION_KINDS)
        for name in ("terms_ns", "anyway_terms_ns"):
            terms = _check_terms(getattr(self, name), f"{what} {name}")
            object.__setattr__(self, name, terms)
        for name in ("pause_ns", "pace_permille", "remaining_steps", "moved_bytes"):
            wire.check_int(getattr(self, name), f"{what} {name}")
        _check_signed(self.gain_ns_per_step, f"{what} gain_ns_per_step")
        if self.pay_back_steps is not None:
            wire.check_int(self.pay_back_steps, f"{what} pay_back_steps")
        wire.check_bool(self.accepted, f"{what} accepted")
        for name in ("offered", "rule"):
            wire.check_str(getattr(self, name), f"{what} {name}")

    @property
    def expected_terms_ns(self) -> Mapping[str, int]:
        """Terms of what is really done: the offered change, or the boundary's."""
        return self.terms_ns if self.accepted else self.anyway_terms_ns

    def to_dict(self) -> dict[str, object]:
        """Return the transition as JSON-ready values."""
        terms = ("terms_ns", "anyway_terms_ns")
        return {**vars(self), **{name: dict(getattr(self, name)) for name in terms}}

    @classmethod
    def from_dict(cls, value: object) -> Transition:
        """Read what `to_dict` gave.

        Raises:
            ValueError: a missing, unknown or wrong field (named).
        """
        names = [entry.name for entry in fields(cls)]
        found = wire.read_object(value, "transition", required=names)
        return cls(**found)  # type: ignore[arg-type]  # checked by __post_init__


def _check_terms(value: object, what: str) -> dict[str, int]:
    terms = wire.read_object(value, what, required=(), optional=TERMS)
    return {
        name: wire.check_int(terms[name], f"{what} {name}")
        for name in TERMS
        if name in terms
    }


def _check_signed(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what}: expected an integer, got {wire.shown(value)}")
    if abs(value) > 2**62:
        raise ValueError(f"{what}: expected -2**62 to 2**62, got {wire.shown(value)}")
