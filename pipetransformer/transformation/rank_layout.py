"""Plans for the ranks that are there, when not all of them are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pipetransformer.autodp import PeerFailure
from pipetransformer.planner import Plan
from pipetransformer.run.context import Run
from pipetransformer.run.layout import Layout, ranks_of_plan
from pipetransformer.transformation.plan_search import fits, still_fitting
from pipetransformer.transformation.proposal import Proposal, group_name

_LOST = "a rank was lost"
_RAN_OUT = "a device ran out of memory"
_REPEATED = "a call failed and is repeated"  # as when copies of records are given up


def _why(run: Run, plan: Plan, able: Collection[int]) -> str:
    """Return why a plan is made anew in a recovery."""
    if not fits(run, plan):
        return _RAN_OUT
    layout = run.in_force.layout
    there = layout is not None and set(layout.active) <= {*able}
    return _REPEATED if there else _LOST


def placed(
    run: Run,
    absent: Collection[int],
    holders: Sequence[int],
    search: Callable[[int | None], Plan],
) -> tuple[Plan, Layout]:
    """Plan with no more replicas than there are blocks with a rank to drive them.

    Args:
        run: The run.
        absent: Ranks that cannot drive one, in addition to those that were lost.
        holders: Ranks that hold the training state, the one that gives it first;
            empty before the first plan.
        search: Plans with at most so many replicas, None: as many as are best.
    """
    members = run.plane.members
    lost = {rank for rank in range(run.info.world_size) if rank not in members}
    most: int | None = None
    while True:
        plan = search(most)
        layout = ranks_of_plan(plan, run.info, {*absent, *lost}, holders)
        if run.info.world_size == 1 or len(layout.active) == plan.num_replicas:
            return plan, layout
        most = len(layout.active)


def propose_again(
    run: Run,
    plan_epoch: int,
    *,
    able: Sequence[int],
    whole: Collection[int],
    operations: int,
    position: int | None,
) -> Proposal:
    """Plan for the ranks that are left, on the rank whose state is everybody's.

    The plan in force stays where there are ranks and memory enough for it; else it
    loses replicas, and keeps K if that fits.

    Args:
        run: The run.
        plan_epoch: The new plan's number.
        able: Ranks that may become or stay active.
        whole: Ranks that hold the same state.
        operations: Operations that are complete in it.
        position: The number of the batch in hand, in a training step.

    Raises:
        PeerFailure: nothing fits the ranks that are left.
    """
    plan = run.in_force.plan
    if plan is None:
        raise RuntimeError("recovery without a plan; please report")
    absent = [rank for rank in range(run.info.world_size) if rank not in able]
    source, held = run.info.rank, plan
    try:
        plan, layout = placed(
            run,
            absent,
            [source, *(r for r in whole if r in able and r != source)],
            lambda most: still_fitting(run, held, most),
        )
    except ValueError as error:
        raise PeerFailure(
            None,
            "recovery",
            epoch=plan_epoch,
            reason=f"{_why(run, held, able)}, and no plan fits: {error}",
        ) from error
    return Proposal(
        plan_epoch=plan_epoch,
        plan=plan,
        layout=layout,
        progress=run.state.counters(),
        policy=run.policy.state_dict(),
        frozen_units=run.state.frozen_units,
        seed=run.config.seed,
        reason=_why(run, held, able),
        pauses=run.costs.state(),
        cache_slots=run.in_force.cache_slots,
        admission=run.in_force.admission,
        source=source,
        receivers=tuple(r for r in layout.active if r != source and r not in whole),
        operations=operations,
        position=position,
        group=group_name(plan_epoch),
    )
