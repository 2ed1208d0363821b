"""From the freeze policy's wish and the measured profile to a plan all agree on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipetransformer import planner
from pipetransformer._extension import hash_bytes, host_memory, usable_cores
from pipetransformer.autocache import Admission, CacheRates
from pipetransformer.autodp import ActiveGroup
from pipetransformer.autodp.told import read_fields
from pipetransformer.autofreeze import (
    FreezeStatistics,
    boundary_of,
    movable_boundary,
)
from pipetransformer.core.devices import memory_bytes
from pipetransformer.data.seeding import generators_kept
from pipetransformer.planner import (
    HOST_LINK_BYTES_PER_S,
    HOST_ROUND_NS,
    HOST_STEP_NS,
    CacheTiers,
    Cluster,
    Plan,
    Profile,
)
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.replica.replica import Replica
from pipetransformer.replica.unit_activations import unit_activations
from pipetransformer.run.arguments import Workload
from pipetransformer.run.cache_costs import rates_before_run
from pipetransformer.run.context import Run
from pipetransformer.run.layout import joiners
from pipetransformer.run.measured_costs import PricingInputs
from pipetransformer.transformation.cache_capacity import admission, cache_room
from pipetransformer.transformation.crowding import Work, keep_busy, measure_cores
from pipetransformer.transformation.kept_profiles import (
    conditions,
    measured_or_kept,
)
from pipetransformer.transformation.plan_search import (
    first_plan,
    next_plan,
    progress_of,
    remaining_steps,
)
from pipetransformer.transformation.proposal import Proposal, group_name
from pipetransformer.transformation.rank_layout import placed
from pipetransformer.transformation.records import record_refusal

_LOG = logging.getLogger(__name__)

AS_DEVICES = "PIPETRANSFORMER_SLOTS_AS_DEVICES"
"""Variable: with 1 slots of a host are planned as the devices that they stand for: each
with a core of its own, and nothing to pay besides its layers."""

_PROBE_ROWS = 32
_ALLOCATED = 0.95  # of an accelerator's memory; the rest are gaps between blocks
_CONTEXT_BYTES = 1 << 30  # of a process on an accelerator: its kernels and libraries


@dataclasses.dataclass(frozen=True)
class FreezeDecision:
    """How far to freeze.

    Attributes:
        units: Units frozen from the front.
        boundary: Index of the first active layer.
        reason: Text for people.
    """

    units: int
    boundary: int
    reason: str


def point_of(run: Run) -> int:
    """Return the number of the freeze policy's evaluation point that is reached.

    Point 0 is before training; then one comes with every epoch, or with every
    `Config.freeze_every` optimizer steps.
    """
    every = run.config.freeze_every
    return run.state.epoch if every is None else run.state.step // every


def is_due(run: Run) -> bool:
    """Tell whether a freeze decision falls to the step boundary that is reached."""
    return (
        run.config.freeze_every is not None and point_of(run) > run.state.decided_epoch
    )


@dataclasses.dataclass(frozen=True)
class Signals:
    """Means over the replicas since the last decision, as far as the policy needs them.

    Attributes:
        loss: Of the training rows.
        plasticity: Of the units.
    """

    loss: float | None = None
    plasticity: list[float] | None = None


def share_signals(run: Run, replica: Replica, *, ends: bool = False) -> Signals:
    """Exchange what replicas found since the last decision; collective.

    Args:
        run: The run.
        replica: What this rank drives.
        ends: The pass is over.

    Returns:
        The means by which every active rank decides.
    """
    losses, changes = run.state.losses, run.changes
    if losses is None and changes is None:
        return Signals()
    point = point_of(run) + (ends and run.config.freeze_every is None)
    if changes is not None and point > run.state.decided_epoch:
        measure_changes(run, point, replica.prefix)
    own = {
        "loss": None if losses is None else losses.own,
        "plasticity": None if changes is None else changes.own,
    }
    told = json.dumps(own).encode()
    parts = [json.loads(part) for part in replica.group.all_gather_bytes(told)]
    return Signals(
        None if losses is None else losses.settle(tuple(p["loss"]) for p in parts),
        None if changes is None else changes.settle(p["plasticity"] for p in parts),
    )


def know_signals(run: Run, signals: Signals) -> None:
    """Take over what other ranks have settled."""
    if run.state.losses is not None:
        run.state.losses.know(signals.loss)
    if run.changes is not None:
        run.changes.know(signals.plasticity)


def measure_changes(run: Run, point: int, prefix: FrozenPrefix | None) -> None:
    """Run the probe batch; compare with what its units gave at the point before.

    Args:
        run: The run.
        point: Number of the evaluation point.
        prefix: The frozen layers, which may rest; None: there are none.
    """
    changes, workload, arguments = run.changes, run.inputs.workload, run.arguments
    if changes is None or workload is None:
        return
    if run.probe_batch is None:
        with generators_kept():
            run.probe_batch = workload.sample(min(_PROBE_ROWS, workload.num_samples))

    def activations() -> Iterator[Tensor]:
        yield from unit_activations(
            arguments.model,
            arguments.unit_ends,
            run.probe_batch,
            most_rows=run.config.eval_microbatch_rows,
            seed=run.config.seed,
        )

    awake = contextlib.nullcontext() if prefix is None else prefix.awake()
    run.freezer.train(False)
    try:
        numerics = run.precision.autocast()
        with run.clock.phase("probe"), awake, torch.no_grad(), numerics:
            changes.measure(point, activations())
    finally:
        run.freezer.train(True)


def take_decision(run: Run) -> None:
    """Ask the freeze policy at the evaluation point that is reached, once.

    Of an epoch it is taken when the epoch before ends, so that a checkpoint written
    there holds its result and not the statistics behind it.

    Source: paper section 3.1 (freeze algorithm).
    """
    state, point = run.state, point_of(run)
    if state.decided_epoch >= point:
        return
    if point > 0:
        run.policy.observe(_measured(run))
    elif run.slots.on_host:  # else the layers are not where they will compute
        measure_changes(run, point, None)  # what the first pass is compared with
    state.wanted_units = run.policy.decide(progress_of(run, point))
    state.decided_epoch = point


def _measured(run: Run) -> FreezeStatistics:
    """Return what the policy needs of the interval that ends, which begins anew."""
    needs, gradients, losses = run.policy.needs, run.gradients, run.state.losses
    norms = l1 = loss = None
    if gradients is not None:
        norms = gradients.norms() if "gradient_norms" in needs else None
        l1 = gradients.l1_norms() if "gradient_l1" in needs else None
        gradients.reset()
    if losses is not None:
        loss = losses.take()
    return FreezeStatistics(
        gradient_norms=norms,
        gradient_l1=l1,
        plasticity=None if run.changes is None else run.changes.take(),
        loss=loss,
    )


def decide(run: Run) -> FreezeDecision:
    """Return the decision in force within the structure rules."""
    take_decision(run)
    state, arguments = run.state, run.arguments
    units, held = movable_boundary(
        arguments.model, arguments.unit_ends, state.wanted_units
    )
    while units > 0 and not _trainable_from(
        run, boundary_of(arguments.unit_ends, units)
    ):
        units -= 1
        held = "behind it nothing would be left to train"
    boundary = boundary_of(arguments.unit_ends, units)
    if held is None and 0 < units == run.policy.starting_units:
        held = f"nothing trains before layer {boundary}"
    before = state.frozen_units
    if units == before:
        reason = f"{units} of {len(arguments.unit_ends)} units stay frozen"
    else:
        verb = "freezes" if units > before else "unfreezes"
        reason = f"{type(run.policy).__name__} {verb} units: {before} to {units}"
    log = run.policy.log
    told = [text for text in (log[-1]["why"] if log else "", held) if text]
    reason += f" ({'; '.join(told)})" if told else ""
    return FreezeDecision(units, boundary, reason)


def _trainable_from(run: Run, boundary: int) -> bool:
    wanted = {id(p) for p in run.arguments.parameters}
    layers = list(run.arguments.model)[boundary:]
    return any(id(p) in wanted for layer in layers for p in layer.parameters())


def agree_on_profile(run: Run, *, lead: bool) -> None:
    """Measure on the lead, publish, and keep the same profile on every rank.

    Profiles differ between ranks, so one of them is everybody's.
    """
    workload = run.inputs.workload
    if run.inputs.profile is not None or workload is None:
        return
    if lead:
        sizes = _sizes(run, workload)
        with run.precision.autocast():
            inputs = workload.sample(max(sizes))
            run.build_optimizer()
            optimizer = run.state.optimizer if run.slots.on_host else None
            measured = measured_or_kept(
                run,
                conditions(run, inputs, sizes),
                measure=lambda: planner.profile(
                    run.arguments.model,
                    inputs,
                    microbatch_samples=sizes,
                    device=None
                    if run.slots.on_host
                    else run.slots.devices[run.slots.own],
                    optimizer=optimizer,
                ),
                rates=lambda profile: _rates(run, workload, profile, inputs),
                cores=lambda: _cores_together(run, workload),
            )
        rates = measured.rates
        message = {
            "profile": measured.profile.to_json(),
            "cluster": _cluster(run, rates, measured.cores_permille).to_json(),
            "rates": rates.to_dict(),
        }
        told = json.dumps(message).encode()
        run.plane.publish("profile", told)
    else:
        if _shares_host(run):
            keep_busy(run, lambda: _work(run, workload))
        told = run.plane.wait("profile", phase="profile", timeout=None)
    content = read_fields(told, "profile")
    run.inputs.profile = Profile.from_json(content["profile"])
    run.inputs.cluster = Cluster.from_json(content["cluster"])
    run.inputs.rates = CacheRates.from_dict(content["rates"])


def _sizes(run: Run, workload: Workload) -> list[int]:
    """Return the micro-batch sizes that are profiled."""
    most = workload.global_batch
    return [n for n in run.config.plan.microbatch_samples if n <= most] or [most]


def _work(run: Run, workload: Workload) -> Work:
    rows = max(_sizes(run, workload))
    inputs = workload.sample(rows)

    def work() -> float:
        with run.precision.autocast():
            return planner.seconds_in_a_row(run.arguments.model, inputs, rows)

    return work


def _cores_together(run: Run, workload: Workload) -> int:
    if not _shares_host(run):
        return 0
    return measure_cores(run, _work(run, workload), _cores_permille(run))


def _rates(run: Run, workload: Workload, profile: Profile, inputs: Any) -> CacheRates:
    cache = run.config.cache
    # Faults are to be found whatever it costs.
    if not cache.enabled or cache.admission != "measured" or cache.debug:
        return CacheRates()
    return rates_before_run(workload, profile, inputs, cache, run.slots.devices[0])


def _cluster(run: Run, rates: CacheRates, cores_permille: int) -> Cluster:
    slots = run.num_slots
    caches, host, disk = run.config.cache.enabled, rates.host, rates.disk
    memory = run.config.plan.slot_memory_bytes or _slot_memory(run)
    return Cluster(
        num_nodes=run.info.num_nodes,
        devices_per_node=slots,
        device_memory_bytes=memory,
        **_host_costs(run, cores_permille),
        context_bytes=_CONTEXT_BYTES if run.slots.type == "cuda" else 0,
        optimizer_bytes_per_parameter_byte=(
            run.config.plan.optimizer_bytes_per_parameter_byte
        ),
        cache=CacheTiers(
            host_bytes=run.caches.budget_bytes() if caches else 0,
            host_bytes_per_s=host.bytes_per_s if host is not None else 0,
            host_record_ns=host.record_ns if host is not None else 0,
            host_in_line=host is not None,
            disk_bytes=run.caches.disk_bytes(),
            disk_bytes_per_s=disk.bytes_per_s if disk is not None else 0,
        ),
    )


def _shares_host(run: Run) -> bool:
    """Tell whether slots are those of a host, and planned as such."""
    return run.slots.on_host and os.environ.get(AS_DEVICES) != "1"


def _cores_permille(run: Run) -> int:
    """Return how many slots of the host have cores at once; 0: all of them."""
    at_once = usable_cores() / run.threads_per_stage
    return 0 if at_once >= run.num_slots else max(1000, int(1000 * at_once))


def _host_costs(run: Run, cores_permille: int) -> dict[str, int]:
    """Return what slots of the host share, and what their processes do."""
    if not run.slots.on_host:
        return {"step_ns": HOST_STEP_NS}
    if not _shares_host(run):
        return {}
    return {
        "step_ns": HOST_STEP_NS,
        "cores_permille": cores_permille,
        "replica_link_bytes_per_s": HOST_LINK_BYTES_PER_S,
        "replica_link_latency_ns": HOST_ROUND_NS,
    }


def _slot_memory(run: Run) -> int:
    """Return what a slot has of its device's memory, on this rank's node."""
    slots = run.slots
    known = None
    if not slots.on_host:
        known = min(filter(None, map(memory_bytes, slots.devices)), default=None)
    if known is None:
        return host_memory().limit_bytes // run.num_slots
    return int(known * _ALLOCATED) // slots.per_device()


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
    else:
        held = replica.plan
        pricing = run.costs.agree(
            replica.group,
            remaining_steps(run),
            cache_slots=slots,
            admission=admitted,
        )
        slots, admitted = pricing.cache_slots, pricing.admission
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
    if workload is not None and prefix is not None and prefix.uses_cache:
        run.caches.obtain("train", workload.num_samples, run.in_force.layout)
    if run.is_lead:
        _LOG.info("[epoch %d] %s", run.state.epoch, now.text)


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
