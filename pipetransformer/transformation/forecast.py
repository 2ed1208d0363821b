"""How long a run will take, as its plan will change."""

from __future__ import annotations

from pipetransformer.autofreeze import boundary_of, movable_boundary
from pipetransformer.planner import InfeasiblePlan, Plan
from pipetransformer.report import EpochRecord
from pipetransformer.run.context import Run
from pipetransformer.run.forecast import Forecast
from pipetransformer.transformation.cache_capacity import admission, cache_room
from pipetransformer.transformation.plan_search import first_plan, progress_of


def foresee(run: Run, plan: Plan, record: EpochRecord) -> Forecast | None:
    """Return what the rest of a run takes, once a pass has ended.

    Each pass to come takes what this one took, times the simulated step of its plan
    over that of the plan in force. Pauses, and passes that fill the cache, are not
    foreseen.

    Args:
        run: The run, on the lead.
        plan: In force.
        record: Of the pass.
    """
    workload, steps = run.inputs.workload, record.optimizer_steps
    coming = run.total_epochs - record.epoch - 1
    now_ns = plan.simulated_step_ns
    if workload is None or run.inputs.profile is None or steps == 0 or now_ns == 0:
        return None
    by_boundary = {plan.boundary: 1.0}
    factors = []
    for boundary in _boundaries(run, plan, record.epoch, coming):
        if boundary not in by_boundary:
            by_boundary[boundary] = _step_ns(run, boundary, now_ns) / now_ns
        factors.append(by_boundary[boundary])
    each = record.seconds / steps
    return Forecast(
        epoch=record.epoch,
        step_seconds=tuple(each * factor for factor in factors),
        steps=steps,
    )


def _boundaries(run: Run, plan: Plan, epoch: int, coming: int) -> list[int]:
    """Return the first active layer in each pass to come, as far as it is known."""
    arguments, state = run.arguments, run.state
    units = None
    if run.config.freeze_every is None:
        decided = min(coming, max(0, state.decided_epoch - epoch))
        done = progress_of(run, state.decided_epoch)
        units = run.policy.foresee(done, coming - decided)
    if units is None:
        return [plan.boundary] * coming
    units = [state.wanted_units] * decided + units
    return [
        boundary_of(
            arguments.unit_ends,
            movable_boundary(arguments.model, arguments.unit_ends, each)[0],
        )
        for each in units
    ]


def _step_ns(run: Run, boundary: int, otherwise: int) -> int:
    room = cache_room(run, boundary, None)
    admitted = admission(run, boundary, room)
    slots = room.samples if admitted is None else admitted.used_samples
    try:
        found = first_plan(run, boundary, slots, admission=admitted)
    except InfeasiblePlan:  # the change of plan will say so
        return otherwise
    return found.simulated_step_ns
