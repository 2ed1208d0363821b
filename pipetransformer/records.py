"""What a run's history and its prices are told about changes of plan."""

from __future__ import annotations

import logging

from pipetransformer.planner import Plan, Transition
from pipetransformer.prices import kind_of
from pipetransformer.report.console import refusal_line, transformation_line
from pipetransformer.report.history import (
    PlanShape,
    RefusalRecord,
    TransformationRecord,
)
from pipetransformer.run import Run
from pipetransformer.transformation import Outcome

_LOG = logging.getLogger(__name__)


def shape_of(run: Run, plan: Plan) -> PlanShape:
    """Return the numbers of the plan in force that people compare."""
    return PlanShape(
        num_frozen_layers=run.state.frozen_units,
        boundary=plan.boundary,
        num_stages=plan.num_stages,
        num_replicas=plan.num_replicas,
        num_microbatches=plan.num_microbatches,
    )


def learn(run: Run, outcome: Outcome, before: Plan | None) -> None:
    """Note what a committed change did to the boundary and took on this rank."""
    plan = outcome.proposal.plan
    run.state.note_boundary(plan.boundary)
    transition = plan.transition
    taken = transition is not None and transition.accepted
    run.prices.record(
        outcome.phases,
        kind=kind_of(before, plan),
        moved_bytes=transition.moved_bytes if transition and taken else 0,
        first=before is None,
    )


def record_change(
    run: Run,
    outcome: Outcome,
    before: PlanShape | None,
    seconds: float,
    *,
    told: bool,
) -> None:
    """Write a committed change into the history; `told`: into the log, too."""
    plan = outcome.proposal.plan
    record = TransformationRecord(
        epoch=run.state.epoch,
        step=run.state.step,
        before=before,
        after=shape_of(run, plan),
        pause_seconds=seconds,
        phases=outcome.phases,
        reason=outcome.proposal.reason,
        transition=plan.transition.to_dict() if plan.transition is not None else None,
    )
    run.history.add(record)
    if told:
        _LOG.info("%s", transformation_line(record))


def record_refusal(run: Run, transition: Transition | None) -> None:
    """Write a change that was not worth it into the history."""
    if transition is None or transition.accepted:
        return
    record = RefusalRecord(epoch=run.state.epoch, transition=transition.to_dict())
    run.history.refusals.append(record)
    if run.is_lead:
        _LOG.info("%s", refusal_line(record))
