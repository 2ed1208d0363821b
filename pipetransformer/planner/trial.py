"""Which of several plans that no model can tell apart is the fastest: tried out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipetransformer.core import wire
from pipetransformer.planner._transition_text import milliseconds
from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.plan import Plan

WITHIN_PERCENT = 10  # what a simulated step may be off by
_MOST = 4
_SHARE = 4  # a trial takes at most one step in so many


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The plans that a run begins with, one after the other, each for some steps.

    The steps are steps of the training: a plan does not change what they compute. The
    plan whose steps took the shortest then stays for as long as the boundary does. At
    later boundaries what was found goes on to count, by name: see `factors`.

    Args:
        boundary: number of frozen layers of all the plans.
        candidates: the plans, 2 to 4; the search's own choice is the first.
        steps: optimizer steps of each that are measured; one more comes before them.
        begun: the optimizer step that the trial began before.
        step_ns: what a batch took, ns, by the name of what ran; see `Candidate.name`.
        ended: the boundary has moved, or the plans cannot be run any more.

    Raises:
        ValueError: a field is malformed; the text names it.

    Source: issue 22, section 6.
    """

    boundary: int
    candidates: tuple[Candidate, ...]
    steps: int
    begun: int = 0
    step_ns: Mapping[str, int] = field(default_factory=dict)
    ended: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for name, low in (("boundary", 0), ("steps", 1), ("begun", 0)):
            wire.check_int(getattr(self, name), f"trial {name}", low=low)
        candidates = tuple(self.candidates)
        if not 2 <= len(candidates) <= _MOST:
            raise ValueError(
                f"trial candidates: expected 2 to {_MOST}, got {len(candidates)}"
            )
        object.__setattr__(self, "candidates", candidates)
        names = [each.name for each in candidates]
        taken = wire.read_object(
            self.step_ns, "trial step_ns", required=(), optional=names
        )
        for name in taken:
            wire.check_int(taken[name], f"trial step_ns of {name}", low=1)
        object.__setattr__(self, "step_ns", taken)
        wire.check_bool(self.ended, "trial ended")

    @classmethod
    def begin(
        cls, plan: Plan, steps: int, *, begun: int = 0, total_steps: int | None = None
    ) -> Trial | None:
        """Return the trial of what comes close to a plan that was searched.

        Args:
            plan: what the run begins with, with what it was compared with.
            steps: optimizer steps of each that are measured.
            begun: optimizer steps before.
            total_steps: optimizer steps of the run that are to come, of which a trial
                takes a quarter at most; None: nobody knows.

        Returns:
            The trial of at most 4 plans, whose simulated steps are at most 10 % longer
            than the plan's; None where there is nothing to compare, or no time.
        """
        most = _MOST
        if total_steps is not None:
            most = min(most, total_steps // _SHARE // (steps + 1))
        longest = plan.simulated_step_ns * (100 + WITHIN_PERCENT)
        close: dict[str, Candidate] = {}
        for each in plan.candidates:
            if each.simulated_step_ns * 100 <= longest:
                close.setdefault(each.name, each)
        candidates = tuple(close.values())[:most]
        if len(candidates) < 2:
            return None
        return cls(
            boundary=plan.boundary, candidates=candidates, steps=steps, begun=begun
        )

    def wanted(self, step: int) -> Candidate:
        """Return what is to run from an optimizer step on: in the end the fastest."""
        turn = max(0, step - self.begun) // (self.steps + 1)
        if turn < len(self.candidates):
            return self.candidates[turn]
        return self.fastest

    def turns_at(self, step: int) -> bool:
        """Tell whether the next plan's turn comes before an optimizer step."""
        turn, within = divmod(step - self.begun, self.steps + 1)
        return not self.ended and within == 0 and 0 < turn <= len(self.candidates)

    def is_over(self, step: int) -> bool:
        """Tell whether every plan has had its turn before an optimizer step."""
        return self.ended or step - self.begun >= self._length

    @property
    def _length(self) -> int:
        return len(self.candidates) * (self.steps + 1)

    @property
    def fastest(self) -> Candidate:
        """The plan that took the shortest steps; the first where none was measured."""
        return min(
            self.candidates,
            key=lambda each: self.step_ns.get(each.name, wire.LARGEST_INT),
        )

    def measured(self, seconds: Mapping[str, Sequence[float]]) -> Trial:
        """Return the trial with what steps took: medians, by what ran.

        Args:
            seconds: of each batch, by the name of what ran; others than the trial's
                are left out.
        """
        found = {
            each.name: max(1, round(statistics.median(seconds[each.name]) * 1e9))
            for each in self.candidates
            if seconds.get(each.name)
        }
        return dataclasses.replace(self, step_ns={**self.step_ns, **found})

    def factors(self, simulated_ns: Mapping[str, int]) -> dict[str, float]:
        """Return what steps took over what is simulated, by name.

        All against the first plan that has both. Where it is 0.9, what is simulated at
        any boundary is 10 % too much, compared with the others.

        Args:
            simulated_ns: Steps of the candidates at the trial's boundary, as they are
                simulated by now, by name.
        """
        found = {
            each.name: self.step_ns[each.name] / max(1, simulated_ns[each.name])
            for each in self.candidates
            if each.name in self.step_ns and each.name in simulated_ns
        }
        first = next(iter(found.values()), 1.0)
        return {name: round(each / first, 3) for name, each in found.items()}

    def rule(self, step: int) -> str:
        """Return why `wanted` is what it is, as a sentence."""
        turn = max(0, step - self.begun) // (self.steps + 1)
        if turn >= len(self.candidates):
            return self.told()
        return (
            f"trial {turn + 1} of {len(self.candidates)}: "
            f"{self.candidates[turn].name} for {self.steps + 1} steps"
        )

    def told(self) -> str:
        """Return what was found, fastest first, as a sentence."""
        known = sorted(
            (
                (self.step_ns[each.name], each.name)
                for each in self.candidates
                if each.name in self.step_ns
            ),
            key=lambda found: found[0],
        )
        if not known:
            return "trial: no step was measured"
        (least, name), *others = known
        sentence = f"trial: {name} takes {milliseconds(least)} a step"
        rest = ", ".join(f"{name} {milliseconds(taken)}" for taken, name in others)
        return f"{sentence}, {rest}" if rest else sentence

    def to_dict(self) -> dict[str, object]:
        """Return the trial as JSON-ready values."""
        candidates = [each.to_dict() for each in self.candidates]
        return {**vars(self), "candidates": candidates, "step_ns": dict(self.step_ns)}

    @classmethod
    def from_dict(cls, value: object) -> Trial:
        """Read what `to_dict` gave.

        Raises:
            ValueError: a missing, unknown or wrong field (named).
        """
        names = [entry.name for entry in dataclasses.fields(cls)]
        found = wire.read_object(value, "trial", required=names)
        found["candidates"] = wire.check_tuple(
            found["candidates"], "trial candidates", Candidate.from_dict
        )
        return cls(**found)  # type: ignore[arg-type]  # checked by __post_init__


def corrected(
    plan: Plan, factors: Mapping[str, float], again: Callable[[Candidate], Plan]
) -> Plan:
    """Return what a search finds if its simulated steps are off by known factors.

    Args:
        plan: what it found.
        factors: by `Candidate.name`, as of `Trial.factors`; 1 for all others.
        again: the same search, narrowed to one candidate.
    """
    if not any(each.name in factors for each in plan.candidates):
        return plan
    compared = sorted(
        (_times(each, factors) for each in plan.candidates),
        key=lambda each: each.simulated_step_ns,
    )
    best, *others = compared
    reasons = plan.reasons
    if best.name != plan.candidates[0].name or best.cuts != plan.cuts:
        plan = again(best)
        reasons = (
            f"{best.name} has the shortest step by what steps took at the start: "
            f"{milliseconds(best.simulated_step_ns)}",
            *plan.reasons[1:],
        )
    return dataclasses.replace(
        plan,
        simulated_step_ns=best.simulated_step_ns,
        candidates=(
            dataclasses.replace(best, lost=""),
            *(
                dataclasses.replace(each, lost=slower(each, best.simulated_step_ns))
                for each in others
            ),
        ),
        reasons=reasons,
        plan_hash=-1,
    )


def _times(candidate: Candidate, factors: Mapping[str, float]) -> Candidate:
    taken = round(candidate.simulated_step_ns * factors.get(candidate.name, 1.0))
    return dataclasses.replace(candidate, simulated_step_ns=taken)


def slower(candidate: Candidate, step_ns: int) -> str:
    """Return how much longer a candidate's step is than a plan's."""
    longer = candidate.simulated_step_ns - step_ns
    if longer == 0:
        return "equal step time"
    permille = longer * 1000 // max(step_ns, 1)
    return f"{permille // 10}.{permille % 10} % slower"
