"""How long a run will take, as its plan will change."""

from __future__ import annotations

import dataclasses

from pipetransformer.autofreeze import boundary_of
from pipetransformer.planner import InfeasiblePlan, Plan
from pipetransformer.report import EpochRecord
from pipetransformer.run.context import Run
from pipetransformer.run.forecast import Forecast
from pipetransformer.transformation.allowed_units import allowed_units
from pipetransformer.transformation.cache_capacity import admission, cache_room
from pipetransformer.transformation.plan_search import (
    first_plan,
    progress_of,
    steps_of_pass,
)


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
        steps=steps_of_pass(run),  # a resumed run's first one may have had fewer
    )


def _boundaries(run: Run, plan: Plan, epoch: int, coming: int) -> list[int]:
    """Return the first active layer in each pass to come, as far as it is known."""
    arguments, state = run.arguments, run.state
    units = None
    if run.config.freeze_every is None:
        decided = min(coming, max(0, state.decided_epoch - epoch))
        units = _units_foreseen(run, epoch, coming - decided)
    if units is None:
        return [plan.boundary] * coming
    units = [state.wanted_units] * decided + units
    return [
        boundary_of(arguments.unit_ends, allowed_units(run, each)[0]) for each in units
    ]


def _units_foreseen(run: Run, epoch: int, points: int) -> list[int] | None:
    """Return the next decisions, the steps of pass `epoch` being done."""
    steps, point = steps_of_pass(run), run.state.decided_epoch
    now = progress_of(run, point)
    undecided = epoch + 1 - point  # points that are reached
    decided = dataclasses.replace(now, step=max(0, now.step - undecided * steps))
    return run.policy.foresee(decided, points, steps=steps)


def _step_ns(run: Run, boundary: int, otherwise: int) -> int:
    room = cache_room(run, boundary, None)
    admitted = admission(run, boundary, room)
    slots = room.samples if admitted is None else admitted.used_samples
    try:
        found = first_plan(run, boundary, slots, admission=admitted)
    except InfeasiblePlan:  # the change of plan will say so
        return otherwise
    return found.simulated_step_ns
