"""From the freeze policy's wish and the measured profile to a plan all agree on."""

from __future__ import annotations

import dataclasses
import logging

from pipetransformer._extension import hash_bytes
from pipetransformer.autocache import Admission
from pipetransformer.autodp import ActiveGroup
from pipetransformer.planner import Plan
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run
from pipetransformer.run.layout import joiners
from pipetransformer.run.measured_costs import PricingInputs
from pipetransformer.transformation.cache_capacity import admission, cache_room
from pipetransformer.transformation.freeze_decision import decide
from pipetransformer.transformation.plan_search import (
    first_plan,
    first_trial,
    next_plan,
    remaining_steps,
)
from pipetransformer.transformation.proposal import Proposal, group_name
from pipetransformer.transformation.rank_layout import placed
from pipetransformer.transformation.records import record_refusal

_LOG = logging.getLogger(__name__)


def propose(
    run: Run,
    replica: Replica | None,
    *,
    absent: tuple[int, ...] = (),
    operations: int = 0,
    position: int | None = None,
) -> Proposal | None:
    """Decide and plan, identically on every active rank.

    Args:
        run: The run.
        replica: What this rank drives; None before the first plan.
        absent: Ranks that must not become active.
        operations: Operations that the active ranks will have completed.
        position: The next batch, within a pass.

    Returns:
        The new plan's message, or None when the plan in force stays.

    Raises:
        RuntimeError: the active ranks planned differently; nothing was changed.
        InfeasiblePlan: nothing fits.
    """
    decision = decide(run)
    prefix = replica.prefix if replica is not None else None
    room = cache_room(run, decision.boundary, prefix)
    admitted = admission(run, decision.boundary, room)
    slots = room.samples if admitted is None else admitted.used_samples
    if replica is None:
        plan, layout = placed(
            run,
            absent,
            (),
            lambda most: first_plan(
                run, decision.boundary, slots, most, admission=admitted
            ),
        )
        run.costs.trial = first_trial(run, plan)
    else:
        held = replica.plan
        run.costs.end_trial(decision.boundary)
        pricing = run.costs.agree(
            replica.group,
            remaining_steps(run),
            cache_slots=slots,
            admission=admitted,
        )
        slots, admitted = pricing.cache_slots, pricing.admission
        _tell_trial(run)
        plan, layout = placed(
            run,
            absent,
            run.in_force.layout.active if run.in_force.layout is not None else (),
            lambda most: next_plan(run, decision.boundary, held, pricing, most),
        )
        _compare_plans(replica.group, plan.plan_hash, pricing)
        record_refusal(run, plan.transition)
        if plan.run == held.run and layout == run.in_force.layout:
            _readmit(run, replica, plan, pricing)
            return None
    before = run.in_force.layout
    joined = joiners(before, layout)
    holders = [rank for rank in layout.active if rank not in joined]
    if before is not None and not holders:
        raise RuntimeError(
            f"plan: expected one of the ranks {before.active} that hold the state "
            f"to stay active, got {layout.active}; please report"
        )
    plan_epoch, state = run.in_force.plan_epoch + 1, run.state
    return Proposal(
        plan_epoch=plan_epoch,
        plan=plan,
        layout=layout,
        # Within a pass that has no batches left its end is still to come.
        progress=state.progress() if position is None else state.counters(),
        policy=run.policy.state_dict(),
        frozen_units=decision.units,
        seed=run.config.seed,
        reason="; ".join([decision.reason, *_why(plan), *_told(admitted)]),
        pauses=run.costs.state(),
        cache_slots=slots,
        admission=admitted,
        source=(holders or layout.active)[0],
        receivers=tuple(joined if holders else layout.active[1:]),
        absent=absent,
        operations=operations,
        position=position,
        group=run.groups.name_for(
            layout.active,
            fresh=group_name(plan_epoch),
            num_devices=run.group_devices(plan.num_stages),
        ),
    )


def _readmit(run: Run, replica: Replica, plan: Plan, pricing: PricingInputs) -> None:
    """Go over to another decision on the cache under a plan that is run as before.

    Every active rank does so at the same place, since what they decide by is equal. The
    ranks that stand by learn it with the next plan.
    """
    before, now = run.in_force.admission, pricing.admission
    replica.plan = plan  # the same, with what is known now of its time
    if before is None or now is None:
        return
    if (before.caches, before.uses_disk) == (now.caches, now.uses_disk):
        return
    run.in_force = dataclasses.replace(
        run.in_force, plan=plan, cache_slots=pricing.cache_slots, admission=now
    )
    workload, prefix = run.inputs.workload, replica.prefix
    if workload is not None and prefix is not None and prefix.wants_cache:
        run.caches.obtain("train", workload.num_samples, run.in_force.layout)
    if run.is_lead:
        _LOG.info("[epoch %d] %s", run.state.epoch, now.text)


def _tell_trial(run: Run) -> None:
    """Say what the plans took that were tried out, once the last has had its turn."""
    trial, step = run.costs.trial, run.state.step
    if trial is None or not run.is_lead:
        return
    if trial.turns_at(step) and trial.is_over(step):
        _LOG.info("[epoch %d] %s", run.state.epoch, trial.told())


def _told(admitted: Admission | None) -> list[str]:
    return [] if admitted is None else [admitted.text]


def _why(plan: Plan) -> list[str]:
    """Return why the plan was chosen, and in short what did not fit."""
    unfit = [text.partition(" does not fit")[0] for text in plan.refusals]
    short = [f"{', '.join(unfit)} would not fit"] if unfit else []
    return [*plan.reasons[:1], *short]


def _compare_plans(group: ActiveGroup, plan_hash: int, pricing: PricingInputs) -> None:
    mine = f"{plan_hash:016x} from {hash_bytes(pricing.to_bytes()):016x}"
    hashes = [part.decode() for part in group.all_gather_bytes(mine.encode())]
    if len(set(hashes)) != 1:
        raise RuntimeError(
            f"plan hashes: expected the same on every active rank, got {hashes}; "
            "nothing was changed"
        )
