"""What plans are made from, measured on one rank and equal on all."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from pipetransformer import planner
from pipetransformer._extension import host_memory, usable_cores
from pipetransformer.autocache import CacheRates
from pipetransformer.autodp.told import read_fields
from pipetransformer.autofreeze import boundary_of, noise_in_front
from pipetransformer.core.devices import memory_bytes
from pipetransformer.data.structures import has_texts_by_row
from pipetransformer.planner import (
    HOST_LINK_BYTES_PER_S,
    HOST_ROUND_NS,
    HOST_STEP_NS,
    NETWORK_BYTES_PER_S,
    CacheTiers,
    Cluster,
    Profile,
)
from pipetransformer.run.arguments import Workload
from pipetransformer.run.cache_costs import rates_before_run
from pipetransformer.run.context import Run
from pipetransformer.transformation.allowed_units import possible_boundaries
from pipetransformer.transformation.crowding import Work, keep_busy, measure_cores
from pipetransformer.transformation.kept_profiles import (
    conditions,
    measured_or_kept,
)

_LOG = logging.getLogger(__name__)

AS_DEVICES = "PIPETRANSFORMER_SLOTS_AS_DEVICES"
"""Variable: with 1 slots of a host are planned as the devices that they stand for: each
with a core of its own, and nothing to pay besides its layers."""

_TELLING_NS = 15_000_000  # of a forward and backward: many turns of a busy core
_KNOWN_NS = 300_000_000  # the same: longer than a machine's pace lasts
_LONGEST_NS = 1_500_000_000  # the same: it is done four times before the first plan
_ALLOCATED = 0.95  # of an accelerator's memory; the rest are gaps between blocks
_CONTEXT_BYTES = 1 << 30  # of a process on an accelerator: its kernels and libraries


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
            whole_batches = _check_layers(run, workload, inputs)
            run.build_optimizer()
            measured = measured_or_kept(
                run,
                conditions(
                    run, inputs, sizes, usable_cores() if _shares_host(run) else None
                ),
                measure=lambda: planner.profile(
                    run.arguments.model,
                    inputs,
                    microbatch_samples=sizes,
                    device=None if run.slots.on_host else _own_device(run),
                    optimizer=run.state.optimizer,
                ),
                rates=lambda profile: _rates(run, workload, profile, inputs),
                cores=lambda profile: _cores_together(run, workload, profile),
            )
        rates = measured.rates
        message = {
            "profile": measured.profile.to_json(),
            "cluster": _cluster(run, rates, measured.cores_permille).to_json(),
            "rates": rates.to_dict(),
            "whole_batches": whole_batches,
        }
        told = json.dumps(message).encode()
        run.plane.publish("profile", told)
    else:
        if _shares_host(run):
            keep_busy(run, lambda rows: _work(run, workload, rows))
        told = run.plane.wait("profile", phase="profile", timeout=None)
    content = read_fields(told, "profile")
    run.inputs.profile = Profile.from_json(content["profile"])
    run.inputs.cluster = Cluster.from_json(content["cluster"])
    run.inputs.rates = CacheRates.from_dict(content["rates"])
    run.inputs.whole_batches = content["whole_batches"]


def _sizes(run: Run, workload: Workload) -> list[int]:
    """Return the micro-batch sizes that are profiled."""
    most = workload.global_batch
    least = min(planner.least_rows(run.arguments.model), most)
    fitting = (n for n in run.config.plan.microbatch_samples if n <= most)
    sizes = sorted({max(n, least) for n in fitting}) or [most]
    if len(sizes) == 1 and run.config.plan.num_microbatches is None:
        # By one size alone the smallest micro-batches would cost next to nothing.
        sizes = sorted({max(least, sizes[0] // 4), *sizes})
    return sizes


def _check_layers(run: Run, workload: Workload, inputs: Any) -> str:
    """Refuse what no plan can run right; warn of what the first one switches off.

    Returns:
        Why batches have to stay whole; empty: they may be cut into micro-batches.
    """
    given = run.arguments
    start = boundary_of(given.unit_ends, run.policy.starting_units)
    if still := noise_in_front(given.model, start):
        _LOG.warning(
            "layer %s: nothing trains before layer %d, so that it is evaluated from "
            "the start, without what it does in training alone; put noise and "
            "augmentation into the dataset, or let no unit end there (units=)",
            ", ".join(still),
            start,
        )
    _check_replicas(run)
    forced = run.config.plan.num_microbatches
    rows = min(workload.global_batch, workload.num_samples)

    def check(*, cuts: bool) -> None:
        if cuts and has_texts_by_row(inputs, rows):
            raise planner.NeedsWholeBatches(
                "inputs: expected tensors where each row has a value of its own, got a "
                "list with a text for each row, which no micro-batch could be given"
            )
        planner.check_layers(
            given.model,
            inputs,
            boundaries=possible_boundaries(run),
            cuts_batches=cuts,
            joins_outputs=cuts and run.config.pipe.schedule in ("gpipe", "auto"),
            device=None if run.slots.on_host else _own_device(run),
        )

    try:
        check(cuts=forced != 1)
    except planner.NeedsWholeBatches as reason:
        if forced is not None:
            raise
        check(cuts=False)
        _LOG.warning("batches are not cut into micro-batches: %s", reason)
        return str(reason)
    return ""


def _check_replicas(run: Run) -> None:
    """Refuse weights that each replica would change by its own rows.

    Raises:
        ValueError: there may be several replicas, and there is such a weight.
    """
    if run.info.world_size == 1 or run.config.plan.max_replicas == 1:
        return
    for name, module in run.arguments.model.named_modules():
        if not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        if module.max_norm is not None and module.weight.requires_grad:
            raise ValueError(
                f"model: expected no max_norm with several replicas, got {name} with "
                f"max_norm={module.max_norm:g}: each would scale the rows that its own "
                "samples look up; set PlanConfig(max_replicas=1)"
            )


def _work(run: Run, workload: Workload, rows: int) -> Work:
    inputs = workload.sample(rows)

    def work() -> float:
        with run.precision.autocast():
            return planner.seconds_in_a_row(run.arguments.model, inputs, rows)

    return work


def _cores_together(run: Run, workload: Workload, profile: Profile) -> int:
    if not _shares_host(run):
        return 0
    rows = rows_that_tell(
        profile, workload.global_batch // (run.num_slots * run.info.num_nodes)
    )
    return measure_cores(
        run,
        lambda rows: _work(run, workload, rows),
        rows,
        _known_seconds(profile, rows),
        _cores_permille(run),
    )


def _known_seconds(profile: Profile, rows: int) -> float | None:
    """Return what all layers take in a row, where the profile tells.

    Its times are scaled to a few runs in a row of the largest micro-batch: too few to
    compare with if they are short.
    """
    taken = sum(_times(profile, -1))
    is_known = rows == profile.microbatch_samples[-1] and taken >= _KNOWN_NS
    return taken / 1e9 if is_known else None


def rows_that_tell(profile: Profile, share: int) -> int:
    """Return the rows of a micro-batch by which slots are compared.

    Fewer rows of a large model wait for memory, more of them compute: so these are as
    many as a step gives a slot, and enough to be timed, as far as they are profiled and
    do not take long.

    Args:
        profile: Of the layers.
        share: Rows of a step, over the slots.
    """
    found = times = 0
    for index, rows in enumerate(profile.microbatch_samples):
        once = sum(_times(profile, index))
        if times >= _TELLING_NS and (rows > share or once > _LONGEST_NS):
            break
        found, times = rows, once
    return found


def _times(profile: Profile, index: int) -> Iterator[int]:
    """Return each layer's forward and backward for one of the sizes, in nanoseconds."""
    for layer in profile.layers:
        yield layer.forward_ns[index]
        yield layer.input_grad_ns[index] + layer.weight_grad_ns[index]


def _rates(run: Run, workload: Workload, profile: Profile, inputs: Any) -> CacheRates:
    cache = run.config.cache
    # Faults are to be found whatever it costs.
    if not cache.enabled or cache.admission != "measured" or cache.debug:
        return CacheRates()
    return rates_before_run(workload, profile, inputs, cache, _own_device(run))


def _cluster(run: Run, rates: CacheRates, cores_permille: int) -> Cluster:
    slots = run.num_slots
    caches, host, disk = run.config.cache.enabled, rates.host, rates.disk
    limit = run.config.plan.slot_memory_bytes
    has_context = limit is None and run.slots.type == "cuda"
    return Cluster(
        num_nodes=run.info.num_nodes,
        devices_per_node=slots,
        device_memory_bytes=limit or _slot_memory(run),
        **_host_costs(run, cores_permille),
        context_bytes=_CONTEXT_BYTES if has_context else 0,
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
    """Return what slots of the host share, and what their processes do.

    Links are assumed: between processes of a host, and between nodes, if there are
    several. On hosts the passes that use them correct that (`StepFactors.link`).
    """
    if not run.slots.on_host:
        costs = {"step_ns": HOST_STEP_NS}
        if run.info.num_nodes > 1:
            costs["network_bytes_per_s"] = NETWORK_BYTES_PER_S
        return costs
    if not _shares_host(run):
        return {}
    costs = {
        "step_ns": HOST_STEP_NS,
        "cores_permille": cores_permille,
        "replica_link_bytes_per_s": HOST_LINK_BYTES_PER_S,
        "replica_link_latency_ns": HOST_ROUND_NS,
    }
    if run.info.num_nodes > 1:
        costs["network_bytes_per_s"] = HOST_LINK_BYTES_PER_S
        costs["network_latency_ns"] = HOST_ROUND_NS
    return costs


def _slot_memory(run: Run) -> int:
    """Return what a slot has of its device's memory, on this rank's node."""
    slots = run.slots
    known = None
    if not slots.on_host:
        known = min(filter(None, map(memory_bytes, slots.devices)), default=None)
    if known is None:
        return host_memory().limit_bytes // run.num_slots
    return int(known * _ALLOCATED) // slots.per_device()


def _own_device(run: Run) -> torch.device:
    return run.slots.devices[run.slots.own]
