"""What changes of plan did: those committed, aborted, and not worth their price."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from pipetransformer.core.wire import (
    LONGEST_NAME,
    Fields,
    check_int,
    check_seconds,
    check_str,
)
from pipetransformer.planner import Transition
from pipetransformer.report.epochs import PlanShape


@dataclasses.dataclass(frozen=True)
class TransformationRecord:
    """One committed change of plan.

    Attributes:
        epoch: The training epoch that it precedes, or falls into.
        step: Optimizer steps done before it.
        before: The old plan's shape; None for the first plan.
        after: The new plan's shape.
        pause_seconds: From the decision to the rewired pipeline, on the lead.
        phases: Seconds per phase of the attempt that was committed; ``"prepare/group"``
            is a part of ``"prepare"``. ``first_step`` is added by the pass that
            follows: what its first step took more than the others; no part of the
            pause. Neither is ``ahead``, of a plan that was prepared while training
            went on: there ``prepare`` is only what was waited for.
        reason: Why the plan changed.
        transition: The price that was asked; None for the first plan.
        plan_epoch: Counter of plans.
        moved_bytes: State that new replicas were given; 0 where there were none.
        group: ``"fresh"``, ``"cached"`` or, where the ranks stayed, ``"same"``.
        attempt: From 0; above it, so many attempts were aborted before.
    """

    epoch: int
    before: PlanShape | None
    after: PlanShape
    pause_seconds: float
    phases: dict[str, float]
    reason: str
    transition: Transition | None = None
    step: int = 0
    plan_epoch: int = 0
    moved_bytes: int = 0
    group: str = ""
    attempt: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the record in the summary's format."""
        before = dataclasses.asdict(self.before) if self.before is not None else None
        priced = self.transition
        return {
            "epoch": self.epoch,
            "step": self.step,
            "from": before,
            "to": dataclasses.asdict(self.after),
            "pause_seconds": self.pause_seconds,
            "phases": self.phases,
            "reason": self.reason,
            "transition": priced.to_dict() if priced is not None else None,
            "plan_epoch": self.plan_epoch,
            "moved_bytes": self.moved_bytes,
            "group": self.group,
            "attempt": self.attempt,
        }

    @classmethod
    def from_json(cls, value: object, what: str) -> TransformationRecord:
        """Read what `to_json` gave; `what` is its name in errors.

        Raises:
            ValueError: a missing or wrong field (named).
        """
        fields = Fields(value, what)
        return cls(
            epoch=fields.read("epoch", check_int),
            before=fields.read_or_none("from", PlanShape.from_json),
            after=fields.read("to", PlanShape.from_json),
            pause_seconds=fields.read("pause_seconds", check_seconds),
            phases=fields.read_mapping("phases", check_seconds),
            reason=fields.read("reason", check_str),
            transition=fields.read_or_none("transition", _transition),
            step=fields.read("step", check_int, 0),
            plan_epoch=fields.read("plan_epoch", check_int, 0),
            moved_bytes=fields.read("moved_bytes", check_int, 0),
            group=fields.read("group", partial(check_str, longest=LONGEST_NAME), ""),
            attempt=fields.read("attempt", check_int, 0),
        )


@dataclasses.dataclass(frozen=True)
class AbortRecord:
    """One attempt at a change of plan that ended in ABORT; the old plan went on.

    Attributes:
        epoch: The training epoch that it would have preceded, or fallen into.
        step: Optimizer steps done before it.
        wanted: The new plan's shape.
        seconds: From the attempt's beginning to the decision, on the lead.
        phases: Seconds per phase.
        reason: Why it was aborted.
        plan_epoch: Counter of plans.
        attempt: From 0; above it, a retry.
        without: Ranks that were left out of this attempt.
        culprits: Ranks that never came, or refused for a reason of their own.
    """

    epoch: int
    step: int
    wanted: PlanShape
    seconds: float
    phases: dict[str, float]
    reason: str
    plan_epoch: int = 0
    attempt: int = 0
    without: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record in the summary's format."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "to": dataclasses.asdict(self.wanted),
            "seconds": self.seconds,
            "phases": self.phases,
            "reason": self.reason,
            "plan_epoch": self.plan_epoch,
            "attempt": self.attempt,
            "without": list(self.without),
            "culprits": list(self.culprits),
        }

    @classmethod
    def from_json(cls, value: object, what: str) -> AbortRecord:
        """Read what `to_json` gave; `what` is its name in errors.

        Raises:
            ValueError: a missing or wrong field (named).
        """
        fields = Fields(value, what)
        return cls(
            epoch=fields.read("epoch", check_int),
            step=fields.read("step", check_int),
            wanted=fields.read("to", PlanShape.from_json),
            seconds=fields.read("seconds", check_seconds),
            phases=fields.read_mapping("phases", check_seconds),
            reason=fields.read("reason", check_str),
            plan_epoch=fields.read("plan_epoch", check_int, 0),
            attempt=fields.read("attempt", check_int, 0),
            without=fields.read_tuple("without", check_int, ()),
            culprits=fields.read_tuple("culprits", check_int, ()),
        )


@dataclasses.dataclass(frozen=True)
class RefusalRecord:
    """One change of K, R, M or cuts that was not worth it.

    Attributes:
        epoch: The training epoch that it would have preceded.
        transition: What was offered, its price, and the rule that refused.
    """

    epoch: int
    transition: Transition

    def to_json(self) -> dict[str, Any]:
        """Return the record in the summary's format."""
        return {"epoch": self.epoch, "transition": self.transition.to_dict()}

    @classmethod
    def from_json(cls, value: object, what: str) -> RefusalRecord:
        """Read what `to_json` gave; `what` is its name in errors.

        Raises:
            ValueError: a missing or wrong field (named).
        """
        fields = Fields(value, what)
        return cls(
            epoch=fields.read("epoch", check_int),
            transition=fields.read("transition", _transition),
        )


@dataclasses.dataclass(frozen=True)
class RecoveryRecord:
    """The loss of ranks that the run survived.

    Attributes:
        epoch: The training epoch that it fell into.
        step: Optimizer steps done then.
        lost: World ranks.
        before: The plan that this rank drove under; None on a standby, and before the
            first plan.
        after: The plan that it drives under now; None on a standby, and where the first
            plan is still to be made.
        pause_seconds: From the begin of the step, or of the change of plan, that failed
            to the rewired pipeline, on this rank; in an evaluation, which is work, and
            on a standby from when the failure was found.
        phases: Seconds per phase of the change of plan, and before it of the
            ``"notice"``, until the failure was found, and of the ``"roll_call"``, with
            attempts that another loss ended.
    """

    epoch: int
    step: int
    lost: list[int]
    before: PlanShape | None
    after: PlanShape | None
    pause_seconds: float
    phases: dict[str, float]

    @property
    def what(self) -> str:
        """Who was lost, in words; after want of memory on a device nobody was."""
        return f"ranks {self.lost} lost" if self.lost else "recovered, nobody lost"

    def to_json(self) -> dict[str, Any]:
        """Return the record in the summary's format."""
        shapes = {"from": self.before, "to": self.after}
        return {
            "epoch": self.epoch,
            "step": self.step,
            "lost": self.lost,
            **{k: dataclasses.asdict(v) if v else None for k, v in shapes.items()},
            "pause_seconds": self.pause_seconds,
            "phases": self.phases,
        }

    @classmethod
    def from_json(cls, value: object, what: str) -> RecoveryRecord:
        """Read what `to_json` gave; `what` is its name in errors.

        Raises:
            ValueError: a missing or wrong field (named).
        """
        fields = Fields(value, what)
        return cls(
            epoch=fields.read("epoch", check_int),
            step=fields.read("step", check_int),
            lost=list(fields.read_tuple("lost", check_int)),
            before=fields.read_or_none("from", PlanShape.from_json),
            after=fields.read_or_none("to", PlanShape.from_json),
            pause_seconds=fields.read("pause_seconds", check_seconds),
            phases=fields.read_mapping("phases", check_seconds),
        )


def _transition(value: object, what: str) -> Transition:
    try:
        return Transition.from_dict(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
