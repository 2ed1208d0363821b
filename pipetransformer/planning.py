"""From the freeze policy's wish and the measured profile to a plan all agree on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TypedDict

from torch import nn

from pipetransformer import planner
from pipetransformer._extension import hash_bytes
from pipetransformer.autodp import ActiveGroup
from pipetransformer.autofreeze import (
    FreezeStatistics,
    Progress,
    boundary_of,
    movable_boundary,
)
from pipetransformer.layout import ranks_of_plan
from pipetransformer.memory import host_bytes
from pipetransformer.planner import Cluster, Plan, Profile, replan, search
from pipetransformer.prices import Market
from pipetransformer.proposal import Proposal
from pipetransformer.records import record_refusal
from pipetransformer.run import Run, Workload
from pipetransformer.transformation import Replica


@dataclasses.dataclass(frozen=True)
class Decision:
    """How far to freeze.

    Attributes:
        units: Units frozen from the front.
        boundary: Index of the first active layer.
        reason: Text for people.
    """

    units: int
    boundary: int
    reason: str


def take_decision(run: Run) -> None:
    """Ask the freeze policy for the epoch that comes, once.

    It is taken when the epoch before ends, so that a checkpoint written there holds
    its result and not the statistics behind it.

    Source: paper section 3.1 (freeze algorithm).
    """
    state = run.state
    if state.decided_epoch >= state.epoch:
        return
    if run.gradients is not None and state.epoch > 0:
        norms = run.gradients.norms()
        run.policy.observe(FreezeStatistics(gradient_norms=norms))
        run.gradients.reset()
    state.wanted_units = run.policy.decide(_progress(run))
    state.decided_epoch = state.epoch


def decide(run: Run) -> Decision:
    """Return the decision for this epoch within the structure rules."""
    take_decision(run)
    state, recipe = run.state, run.recipe
    units, held = movable_boundary(recipe.model, recipe.unit_ends, state.wanted_units)
    while units > 0 and not _trainable_from(run, boundary_of(recipe.unit_ends, units)):
        units -= 1
        held = "behind it nothing would be left to train"
    boundary = boundary_of(recipe.unit_ends, units)
    before = state.frozen_units
    if units == before:
        reason = f"{units} of {len(recipe.unit_ends)} units stay frozen"
    else:
        verb = "freezes" if units > before else "unfreezes"
        reason = f"{type(run.policy).__name__} {verb} units: {before} to {units}"
    return Decision(units, boundary, f"{reason} ({held})" if held else reason)


def _trainable_from(run: Run, boundary: int) -> bool:
    wanted = {id(p) for p in run.recipe.parameters}
    layers = list(run.recipe.model)[boundary:]
    return any(id(p) in wanted for layer in layers for p in layer.parameters())


def _progress(run: Run) -> Progress:
    state = run.state
    optimizer = state.optimizer
    batches = run.workload.num_batches if run.workload is not None else 0
    return Progress(
        epoch=state.epoch,
        step=state.step,
        total_steps=batches * run.total_epochs or None,
        learning_rate=(
            float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None
        ),
        metrics=run.metrics,
    )


def agree_on_profile(run: Run, *, lead: bool) -> None:
    """Measure on the lead, publish, and keep the same profile on every rank.

    Profiles differ between ranks, so one of them is everybody's.
    """
    if run.profile is not None or run.workload is None:
        return
    if lead:
        most = run.workload.global_batch
        sizes = [n for n in run.config.plan.microbatch_samples if n <= most] or [most]
        profile = planner.profile(
            run.recipe.model, run.workload.sample(max(sizes)), microbatch_samples=sizes
        )
        cluster = _cluster(run)
        text = json.dumps({"profile": profile.to_json(), "cluster": cluster.to_json()})
        run.plane.publish("profile", text.encode())
        run.profile, run.cluster = profile, cluster
        return
    content = json.loads(run.plane.wait("profile", phase="profile", timeout=None))
    run.profile = Profile.from_json(content["profile"])
    run.cluster = Cluster.from_json(content["cluster"])


def _cluster(run: Run) -> Cluster:
    slots = run.num_slots
    memory = run.config.plan.slot_memory_bytes or host_bytes() // slots
    return Cluster(
        num_nodes=run.info.num_nodes,
        devices_per_node=slots,
        device_memory_bytes=memory,
        optimizer_bytes_per_parameter_byte=(
            run.config.plan.optimizer_bytes_per_parameter_byte
        ),
    )


def first_plan(run: Run, boundary: int) -> Plan:
    """Search the plan that a run begins with.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer.

    Raises:
        InfeasiblePlan: nothing fits; a ValueError that names what is missing.
    """
    profile, cluster, workload = _known(run)
    return search(
        profile, cluster, boundary=boundary, **_options(run, workload, boundary)
    )


def next_plan(run: Run, boundary: int, current: Plan, market: Market) -> Plan:
    """Plan again at a boundary, and price what would change beyond it.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer from now on.
        current: The plan in force.
        market: The lead's, equal on every active rank.

    Raises:
        InfeasiblePlan: nothing fits, or the plan in force cannot go on and no other
            can be reached.
    """
    profile, cluster, workload = _known(run)
    wishes = run.config.plan
    return replan(
        profile,
        cluster,
        current=current,
        boundary=boundary,
        remaining_steps=market.remaining_steps,
        pace=market.pace,
        pauses=market.pauses,
        elapsed_since_last_ns=market.elapsed_ns,
        hysteresis=wishes.hysteresis,
        reshape=wishes.reshape,
        **_options(run, workload, boundary),
    )


def remaining_steps(run: Run) -> int:
    """Return the optimizer steps for which a shorter step pays.

    Until the policy changes its answer, if it knows when, else until the end: the
    next freeze makes another plan.
    """
    if run.workload is None:
        return 0
    last = run.total_epochs
    change = run.policy.next_change(_progress(run))
    until = last if change is None else min(change, last)
    batches = (until - run.state.epoch) * run.workload.num_batches - run.state.batch
    return max(0, batches)


def _known(run: Run) -> tuple[Profile, Cluster, Workload]:
    if run.profile is None or run.cluster is None or run.workload is None:
        raise RuntimeError("plan asked for before the profile; please report")
    return run.profile, run.cluster, run.workload


class _Options(TypedDict):
    """Options of `search` and `replan` that hold for a whole run."""

    global_batch: int
    num_stages: int | None
    num_microbatches: int | None
    max_replicas: int | None
    cuts: Sequence[int] | None
    checkpoint: str
    cache_tiers: Sequence[str]
    num_samples: int | None
    min_microbatch_samples: int


def _options(run: Run, workload: Workload, boundary: int) -> _Options:
    wishes = run.config.plan
    alone = run.info.world_size == 1
    return _Options(
        global_batch=workload.global_batch,
        num_stages=_forced_stages(run, boundary),
        num_microbatches=wishes.num_microbatches,
        max_replicas=1 if alone else wishes.max_replicas,
        cuts=wishes.cuts,
        checkpoint=run.config.pipe.checkpoint,
        cache_tiers=("host",) if run.config.cache.enabled else ("none",),
        num_samples=workload.num_samples,
        min_microbatch_samples=2 if _has_batch_norm(run.recipe.model) else 1,
    )


def _forced_stages(run: Run, boundary: int) -> int | None:
    """Return the forced K, at most the layers that are still active."""
    forced = run.config.plan.num_stages
    if forced is None or boundary == 0:
        return forced
    return min(forced, len(run.recipe.model) - boundary)


def _has_batch_norm(model: nn.Module) -> bool:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return any(isinstance(m, norms) and m.training for m in model.modules())


def propose(run: Run, replica: Replica | None) -> Proposal | None:
    """Decide and plan, on every active rank alike.

    Args:
        run: The run.
        replica: What this rank drives; None before the first plan.

    Returns:
        The new plan's message, or None when the plan in force stays.

    Raises:
        RuntimeError: the active ranks planned differently; nothing was changed.
        InfeasiblePlan: nothing fits.
    """
    decision = decide(run)
    if replica is None:
        plan = first_plan(run, decision.boundary)
    else:
        market = run.prices.agree(replica.group, remaining_steps(run))
        plan = next_plan(run, decision.boundary, replica.plan, market)
        _compare_plans(replica.group, plan.plan_hash, market)
        if run.info.rank == 0:
            record_refusal(run, plan.transition)
        if _runs_alike(plan, replica.plan):
            return None
    return Proposal(
        plan_epoch=run.plan_epoch + 1,
        plan=plan,
        layout=ranks_of_plan(plan, run.info),
        progress=run.state.progress(),
        policy=run.policy.state_dict(),
        frozen_units=decision.units,
        seed=run.config.seed,
        reason="; ".join([decision.reason, *_why(plan)]),
        pauses=run.prices.state(),
    )


def _why(plan: Plan) -> list[str]:
    """Return why the plan was chosen, and in short what did not fit."""
    unfit = [text.partition(" does not fit")[0] for text in plan.refusals]
    short = [f"{', '.join(unfit)} would not fit"] if unfit else []
    return [*plan.reasons[:1], *short]


def _runs_alike(plan: Plan, other: Plan) -> bool:
    """Tell whether two plans differ in nothing that runs."""
    return (plan.boundary, plan.cuts, plan.shape, plan.schedule) == (
        other.boundary,
        other.cuts,
        other.shape,
        other.schedule,
    )


def _compare_plans(group: ActiveGroup, plan_hash: int, market: Market) -> None:
    mine = f"{plan_hash:016x} from {hash_bytes(market.to_bytes()):016x}"
    hashes = [part.decode() for part in group.all_gather_bytes(mine.encode())]
    if len(set(hashes)) != 1:
        raise RuntimeError(
            f"plan hashes: expected the same on every active rank, got {hashes}; "
            "nothing was changed"
        )
