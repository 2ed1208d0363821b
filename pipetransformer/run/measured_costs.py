"""What changes of plan have taken in this run: the input of the next decision."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipetransformer.autocache import Admission
from pipetransformer.autodp import ActiveGroup, gather_at
from pipetransformer.core.wire import check_object
from pipetransformer.planner import PauseModel, Plan, Trial
from pipetransformer.run.cache_costs import CacheCosts
from pipetransformer.run.step_costs import StepFactors, StepLearner

_NANOSECONDS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class PricingInputs:
    """What the active ranks must know identically before they price a change.

    Attributes:
        pauses: What changes have taken so far.
        elapsed_ns: Since K or R changed last, without the time between a checkpoint and
            the run that resumes from it; None: never.
        remaining_steps: Batches for which a gain lasts.
        steps: What steps take over what was expected.
        cache_slots: Samples that the slab of the lead's node holds at the boundary; 0
            where its frozen layers run for every batch.
        admission: Why they do, or do not; None: it was not compared.
        trial: Plans that are tried out, or were; None: there was nothing to try.
    """

    pauses: PauseModel
    elapsed_ns: int | None
    remaining_steps: int
    steps: StepFactors
    cache_slots: int
    admission: Admission | None = None
    trial: Trial | None = None

    def to_bytes(self) -> bytes:
        """Serialise as JSON."""
        content = {
            "pauses": self.pauses.to_dict(),
            "elapsed_ns": self.elapsed_ns,
            "remaining_steps": self.remaining_steps,
            "steps": self.steps.to_dict(),
            "cache_slots": self.cache_slots,
            "admission": self.admission and self.admission.to_dict(),
            "trial": self.trial and self.trial.to_dict(),
        }
        return json.dumps(content, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PricingInputs:
        """Read what `to_bytes` gave."""
        content = json.loads(data)
        admission, trial = content["admission"], content["trial"]
        return cls(
            pauses=PauseModel.from_dict(content["pauses"]),
            elapsed_ns=content["elapsed_ns"],
            remaining_steps=content["remaining_steps"],
            steps=StepFactors.from_dict(content["steps"], "pricing steps"),
            cache_slots=content["cache_slots"],
            admission=admission and Admission.from_dict(admission),
            trial=trial and Trial.from_dict(trial),
        )


class MeasuredCosts:
    """Measured pauses of one rank; the lead's are everybody's when a plan is made.

    Attributes:
        pauses: What changes of plan have taken.
        cache: What the cache and the frozen layers have taken.
        steps: What steps take over what was expected, as all active ranks plan by it.
        learner: What this rank has found of that.
        trial: Plans that are tried out, or were, as all active ranks know them; None:
            there was nothing to try.
    """

    def __init__(self) -> None:
        self.cache = CacheCosts()
        self.pauses = PauseModel()
        self.steps = StepFactors()
        self.learner = StepLearner()
        self.trial: Trial | None = None
        self._tried: dict[str, list[float]] = {}  # seconds of batches, by plan
        self._reshaped_at: float | None = None

    def agree(
        self,
        group: ActiveGroup,
        remaining_steps: int,
        *,
        cache_slots: int,
        admission: Admission | None = None,
    ) -> PricingInputs:
        """Return the lead's inputs on every active rank; collective over `group`.

        Ranks measure different pauses; their clocks and slabs differ. The lead is the
        group's first rank.
        """
        mine = PricingInputs(
            self.pauses,
            self.elapsed_ns(),
            remaining_steps,
            self.learner.factors,
            cache_slots,
            admission,
            self.trial and self.trial.measured(self._tried),
        )
        first = mine.to_bytes() if group.rank == 0 else b""
        told = gather_at(group, "a change of plan", first)
        pricing = PricingInputs.from_bytes(told[0])
        self.pauses, self.steps = pricing.pauses, pricing.steps
        self.trial = pricing.trial
        return pricing

    def elapsed_ns(self) -> int | None:
        """Return the time since K or R changed last; None: never."""
        if self._reshaped_at is None:
            return None
        return round((time.perf_counter() - self._reshaped_at) * _NANOSECONDS)

    def load_elapsed(self, elapsed_ns: object) -> None:
        """Let the clock go on from what `elapsed_ns` gave in the run before.

        Raises:
            ValueError: neither None nor a number of nanoseconds.
        """
        if elapsed_ns is None:
            self._reshaped_at = None
            return
        if (
            not isinstance(elapsed_ns, int)
            or isinstance(elapsed_ns, bool)
            or elapsed_ns < 0
        ):
            raise ValueError(
                "checkpoint reshaped_ns_ago: expected nanoseconds from 0 or nothing, "
                f"got {elapsed_ns!r}"
            )
        self._reshaped_at = time.perf_counter() - elapsed_ns / _NANOSECONDS

    def record(
        self, phases: Mapping[str, float], *, kind: str, moved_bytes: int, first: bool
    ) -> None:
        """Take in a committed change of plan.

        Args:
            phases: Seconds by phase.
            kind: Of the change, as in `planner.Transition`.
            moved_bytes: Bytes handed to new replicas.
            first: It was the first plan; what only a start takes says nothing about
                later changes.
        """
        if first:
            return
        self.pauses = self.pauses.observed(phases, kind=kind, moved_bytes=moved_bytes)
        if kind == "shape":
            self._reshaped_at = time.perf_counter()

    def record_first_step(self, seconds: float) -> None:
        """Take in what the first step after a change took more than the others."""
        self.pauses = self.pauses.observed({"first_step": seconds}, kind="none")

    def record_steps(
        self, plan: Plan, seconds: Sequence[float], *, first_step: int
    ) -> None:
        """Take in what batches took under a plan, as long as plans are tried out.

        Args:
            plan: The plan.
            seconds: Of each batch.
            first_step: The optimizer step that they began before. What comes after the
                trial says nothing of the plans that do not run any more.
        """
        if self.trial is not None and not self.trial.is_over(first_step):
            self._tried.setdefault(plan.name, []).extend(seconds)

    def end_trial(self, boundary: int) -> None:
        """Try no more plans out once the boundary is another one than theirs."""
        if self.trial is not None and self.trial.boundary != boundary:
            self.trial = dataclasses.replace(self.trial, ended=True)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint and a plan's message keep."""
        trial = self.trial and self.trial.measured(self._tried)
        told = {} if trial is None else {"trial": trial.to_dict()}
        return {**self.pauses.to_dict(), "steps": self.steps.to_dict(), **told}

    def load(self, state: object) -> None:
        """Take over what another rank or a checkpoint knows.

        Raises:
            ValueError: malformed; the text names the field.
        """
        given = dict(check_object(state, "measured pauses"))
        steps, trial = given.pop("steps", None), given.pop("trial", None)
        self.pauses = PauseModel.from_dict(given)
        if steps is not None:
            self.steps = StepFactors.from_dict(steps, "measured steps")
            self.learner.follow(self.steps)
        self.trial = None if trial is None else Trial.from_dict(trial)


def kind_of(before: Plan | None, after: Plan) -> str:
    """Return the class of a change that was carried out, as in `planner.Transition`.

    A first plan builds a group, as a new K or R does.
    """
    if before is None or before.shape[:2] != after.shape[:2]:
        return "shape"
    return "boundary" if before.boundary != after.boundary else "cuts"
