"""What a run's history and its prices record of changes of plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pipetransformer.core.wire import printable
from pipetransformer.planner import Plan, Transition
from pipetransformer.report import (
    AbortRecord,
    PlanShape,
    RecoveryRecord,
    RefusalRecord,
    TransformationRecord,
    abort_line,
    recovery_line,
    refusal_line,
    transformation_line,
)
from pipetransformer.run.context import Run
from pipetransformer.run.measured_costs import kind_of
from pipetransformer.transformation.allowed_units import decisions_of
from pipetransformer.transformation.phases import Outcome

_LOG = logging.getLogger(__name__)


def shape_of(run: Run, plan: Plan) -> PlanShape:
    """Return the numbers of the plan in force that people compare."""
    return _shape(plan, run.state.frozen_units)


def _shape(plan: Plan, frozen_units: int) -> PlanShape:
    return PlanShape(
        num_frozen_layers=frozen_units,
        boundary=plan.boundary,
        num_stages=plan.num_stages,
        num_replicas=plan.num_replicas,
        num_microbatches=plan.num_microbatches,
    )


def learn(run: Run, outcome: Outcome, before: Plan | None) -> None:
    """Note what a committed change did to the boundary and took on this rank."""
    plan = outcome.proposal.plan
    run.state.note_boundary(plan.boundary)
    run.history.freezes = [dict(entry) for entry in run.state.freezes]
    counters = run.history.counters
    counters.transformations_committed += 1
    counters.bytes_moved += outcome.moved_bytes
    count(run)
    transition = plan.transition
    taken = transition is not None and transition.accepted
    run.costs.record(
        outcome.phases,
        kind=kind_of(before, plan),
        moved_bytes=transition.moved_bytes if transition and taken else 0,
        first=before is None,
    )
    _warn_of_lone_replica(run, plan)


def _warn_of_lone_replica(run: Run, plan: Plan) -> None:
    """Say once that the run would not survive a loss that it is asked to survive."""
    layout, config = run.in_force.layout, run.config
    if (
        run.warned_of_lone_replica
        or layout is None
        or len(layout.active) > 1
        or run.info.world_size == 1
        or config.autodp.on_peer_failure != "continue"
    ):
        return
    run.warned_of_lone_replica = True
    if not run.is_lead:
        return
    there, most = len(run.plane.members), config.plan.max_replicas
    why = f"K={plan.num_stages} on {there} of {run.info.world_size} ranks"
    _LOG.warning(
        "on_peer_failure='continue': the plan has one replica (%s); the run ends if "
        "rank %d is lost, which drives it and alone holds the training state",
        "max_replicas=1" if most == 1 else why,
        *layout.active,
    )


def count(run: Run) -> None:
    """Bring the history up to date with what counts, and decides, by itself."""
    run.history.decisions = [
        {
            "epoch": entry["progress"]["epoch"],
            "step": entry["progress"]["step"],
            "units": entry["decision"],
            "wanted": entry["wanted"],
            "statistics": dict(entry["statistics"]),
            "why": entry["why"],
        }
        for entry in decisions_of(run)
    ]
    counters = run.history.counters
    counters.groups_built = run.groups.built
    counters.groups_reused = run.groups.reused
    counters.store_operations = run.plane.num_store_operations


def record_change(
    run: Run,
    outcome: Outcome,
    before: PlanShape | None,
    seconds: float,
    *,
    attempt: int,
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
        reason=printable(outcome.proposal.reason),  # may quote names of layers
        transition=plan.transition,
        plan_epoch=outcome.proposal.plan_epoch,
        moved_bytes=outcome.moved_bytes,
        group=outcome.group,
        attempt=attempt,
    )
    run.history.add(record)
    run.clock.mark(f"plan {record.plan_epoch}: {record.after}")
    if run.is_lead:
        run.arguments.listeners.transformation(record)
    if told:
        _LOG.info("%s", transformation_line(record))


def record_abort(
    run: Run, outcome: Outcome, seconds: float, *, attempt: int, told: bool
) -> None:
    """Write an aborted attempt into the history; `told`: into the log, too."""
    proposal = outcome.proposal
    record = AbortRecord(
        epoch=run.state.epoch,
        step=run.state.step,
        wanted=_shape(proposal.plan, proposal.frozen_units),
        seconds=seconds,
        phases=outcome.phases,
        reason=printable(outcome.reason),  # may be errors of other ranks
        plan_epoch=proposal.plan_epoch,
        attempt=attempt,
        without=proposal.absent,
        culprits=outcome.culprits,
    )
    run.history.aborted.append(record)
    run.clock.mark(f"plan {record.plan_epoch} aborted: {record.reason}")
    if told:
        _LOG.warning("%s", abort_line(record))


def record_loss(
    run: Run,
    before: PlanShape | None,
    after: PlanShape | None,
    lost: Sequence[int],
    seconds: float,
    phases: dict[str, float],
) -> None:
    """Write into the history that the run went on without some ranks."""
    record = RecoveryRecord(
        epoch=run.state.epoch,
        step=run.state.step,
        lost=list(lost),
        before=before,
        after=after,
        pause_seconds=seconds,
        phases=phases,
    )
    run.history.recoveries.append(record)
    run.clock.mark(record.what)
    run.history.counters.failures_survived += len(lost)
    if run.is_lead:
        run.tell_step()
        _LOG.warning("%s", recovery_line(record))
        run.arguments.listeners.failure(record)


def record_refusal(run: Run, transition: Transition | None) -> None:
    """Write a change that was not worth it into the history."""
    if transition is None or transition.accepted:
        return
    record = RefusalRecord(epoch=run.state.epoch, transition=transition)
    run.history.refusals.append(record)
    if run.is_lead:
        _LOG.info("%s", refusal_line(record))
