"""From the freeze policy's wish and the measured profile to a plan all agree on."""

from __future__ import annotations

import dataclasses
import json

from torch import nn

from pipetransformer.autofreeze import (
    FreezeStatistics,
    Progress,
    boundary_of,
    movable_boundary,
)
from pipetransformer.memory import host_bytes
from pipetransformer.planner import Cluster, Plan, Profile, measure_profile, search
from pipetransformer.run import Run


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


def decide(run: Run) -> Decision:
    """Ask the freeze policy, once per epoch, and keep to the structure rules.

    Source: paper section 3.1 (freeze algorithm).
    """
    state, recipe = run.state, run.recipe
    if state.decided_epoch < state.epoch:
        if run.gradients is not None and state.epoch > 0:
            norms = run.gradients.norms()
            run.policy.observe(FreezeStatistics(gradient_norms=norms))
            run.gradients.reset()
        wanted = run.policy.decide(_progress(run))
        state.decided_epoch = state.epoch
    else:
        wanted = state.frozen_units
    units, held = movable_boundary(recipe.model, recipe.unit_ends, wanted)
    boundary = boundary_of(recipe.unit_ends, units)
    before = state.frozen_units
    if units == before:
        reason = f"{units} of {len(recipe.unit_ends)} units stay frozen"
    else:
        verb = "freezes" if units > before else "unfreezes"
        reason = f"{type(run.policy).__name__} {verb} units: {before} to {units}"
    return Decision(units, boundary, f"{reason} ({held})" if held else reason)


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
        sizes = [
            size
            for size in run.config.plan.microbatch_samples
            if size <= run.workload.global_batch
        ]
        profile = measure_profile(
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


def make_plan(run: Run, boundary: int, current: Plan | None) -> Plan:
    """Search the plan for a boundary.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer.
        current: The plan in force.

    Raises:
        InfeasiblePlan: nothing fits; a ValueError that names what is missing.
    """
    if run.profile is None or run.cluster is None or run.workload is None:
        raise RuntimeError("plan asked for before the profile; please report")
    wishes = run.config.plan
    alone = run.info.world_size == 1
    return search(
        run.profile,
        run.cluster,
        global_batch=run.workload.global_batch,
        boundary=boundary,
        num_stages=_forced_stages(run, boundary),
        num_microbatches=wishes.num_microbatches,
        max_replicas=1 if alone else wishes.max_replicas,
        cuts=wishes.cuts,
        checkpoint=run.config.pipe.checkpoint,
        current=current,
        min_microbatch_samples=2 if _has_batch_norm(run.recipe.model) else 1,
        prefix_cached=run.config.cache.enabled,
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
