"""What survivors of a failure know of each other, and what follows from it.

Decisions only: every survivor draws the same conclusion from the same reports.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

_JOINABLE = {
    "step": "pass",
    "epoch": "epoch",
    "evaluate": "evaluate",
    "predict": "predict",
}
"""The call in which a standby can join, by the call that the active ranks are in."""

FIRST = "first plan"
"""The call in which the first plan is made; nothing has been trained before it."""

END = "finish"
"""The call in which nothing is left to train."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """Where one rank was when it heard of the failure.

    Attributes:
        done: Operations that it has completed.
        result: What the last of them gave; see `ControlLog`.
        step: Optimizer steps done.
        holds: Its weights, buffers and moments are whole, and those after `done`.
        decided: The freeze policy's last evaluation point that was decided here.
        active: It drives a pipeline.
        call: The engine call that it was in.
        script: Its position in the lead's script.
        first: Its position there when it came to make the first plan; None on a rank
            that has not come so far, or has that plan.
        position: The number of the batch in hand, in a training step.
        plan_epoch: The last plan that it has taken part in.
        plan_hash: Of the plan in force there.
        segment: Finished segments of the pass.
        counts: What its replica has counted in the open segment.
        due_at: The batch before which a plan was to take effect that was being
            prepared.
        memory_limit: What a slot may take at most, in bytes, since a device ran out of
            memory; None: what was assumed before.
        drops_copies: Its device ran out of memory, and it gives up copies of records.
    """

    done: int
    result: Any = None
    step: int = 0
    holds: bool = False
    decided: int = -1
    active: bool = False
    call: str = ""
    script: int = 0
    first: int | None = None
    position: int | None = None
    plan_epoch: int = 0
    plan_hash: str = ""
    segment: int = 0
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    due_at: int | None = None
    memory_limit: int | None = None
    drops_copies: bool = False

    def to_bytes(self) -> bytes:
        """Serialise as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankReport:
        """Read what `to_bytes` gave.

        Raises:
            RuntimeError: the bytes are something else.
        """
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            raise RuntimeError(
                "rank report: expected the fields of this version, got other bytes"
            ) from None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the survivors go on.

    Attributes:
        source: The rank whose state is everybody's.
        whole: Ranks that hold the same state as `source`, what the freeze policy will
            look at included: a decision is taken before the ranks meet about it.
        able: Ranks that may drive a pipeline from here on.
        script: The lowest script position among the survivors.
        begins: No survivor has come through the first plan: it is made anew.
        at_end: There is nothing left to train.
    """

    source: int
    whole: tuple[int, ...]
    able: tuple[int, ...]
    script: int
    begins: bool
    at_end: bool


def assess(reports: Mapping[int, RankReport]) -> Verdict:
    """Conclude who is ahead, and who may train on.

    An operation counts if some survivor that holds the state has completed it; ranks
    that are behind take its result. A standby may drive only where its script waits
    for just what the active ranks do next.

    Args:
        reports: By world rank, of all survivors.

    Raises:
        ValueError: no survivor holds the training state, or survivors hold states of
            different histories.
    """
    holders = {rank: s for rank, s in reports.items() if s.holds}
    if not holders:
        raise ValueError(
            "training state: expected a survivor that holds it, got none of ranks "
            f"{sorted(reports)}"
        )
    most = max(s.done for s in holders.values())
    source = min(rank for rank, s in holders.items() if s.done == most)
    ahead = reports[source]
    for rank, report in holders.items():
        if not most - 1 <= report.done <= most:
            raise ValueError(
                f"operations done: expected ranks at most one apart, got {most} on "
                f"rank {source} and {report.done} on rank {rank}"
            )
        same_place = (report.done, report.plan_epoch) == (most, ahead.plan_epoch)
        if same_place and (report.step, report.plan_hash) != (
            ahead.step,
            ahead.plan_hash,
        ):
            raise ValueError(
                "training state: expected one history, got step "
                f"{ahead.step} of plan {ahead.plan_hash!r} on rank {source} and step "
                f"{report.step} of plan {report.plan_hash!r} on rank {rank}"
            )
    return Verdict(
        source=source,
        whole=tuple(
            sorted(
                rank
                for rank, s in holders.items()
                if (s.done, s.decided) == (most, ahead.decided)
            )
        ),
        able=tuple(sorted(r for r, s in reports.items() if _able(s, ahead))),
        script=min(s.script if s.first is None else s.first for s in reports.values()),
        begins=ahead.call == FIRST,
        at_end=ahead.call == END,
    )


def _able(report: RankReport, ahead: RankReport) -> bool:
    if report.active:
        return report.done >= ahead.done - 1
    joins = _JOINABLE.get(ahead.call)
    return report.script == ahead.script and report.call == joins
