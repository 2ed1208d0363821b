"""What the activation cache will serve of a frozen prefix, as plans receive it."""

from __future__ import annotations

import dataclasses

from pipetransformer.autocache import (
    Admission,
    Prospect,
    bytes_on_disk,
    cacheable,
    decide,
    on_disk,
    usual_bytes,
)
from pipetransformer.planner import CacheTiers, Cluster, Profile
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.run.cache_costs import (
    active_ns,
    disk_sharers,
    prefix_ns,
    prefix_rows,
)
from pipetransformer.run.caches import Room
from pipetransformer.run.context import Run


def cache_room(run: Run, boundary: int, prefix: FrozenPrefix | None) -> Room:
    """Return how many samples this node's cache holds at a boundary.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer.
        prefix: The frozen layers in force, which know more than their modules tell.

    Returns:
        The room, none where frozen layers run for every batch: the cache is off,
        could not be made, or must not be used for these layers.
    """
    if not run.config.cache.enabled or boundary == 0:
        return Room()
    if cacheable(list(run.arguments.model)[:boundary], frozen=False) is not None:
        return Room()
    if prefix is not None and prefix.boundary == boundary and prefix.refusal:
        return Room()
    return run.caches.training_room()


def admission(run: Run, boundary: int, room: Room) -> Admission | None:
    """Decide by cost whether a boundary's activations are kept, as this rank sees it.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer.
        room: From `cache_room`.

    Returns:
        The decision; None where there is nothing to decide: no cache, or no rates,
        since it is to be used whatever it costs or they could not be measured.
    """
    inputs, costs, held = run.inputs, run.costs.cache, run.in_force
    profile, workload, rates = inputs.profile, inputs.workload, inputs.rates.host
    if room.samples == 0 or rates is None:
        return None
    if profile is None or workload is None:
        raise RuntimeError("admission asked for before the profile; please report")
    shape = (run.config.plan.num_stages or 1, 1)  # nothing is known of a first plan
    if held.plan is not None:
        shape = (held.plan.num_stages, held.plan.num_replicas)
    stages = min(shape[0], len(profile.layers) - boundary)
    rows = prefix_rows(workload.global_batch, shape[1], stages)

    def layers_ns(begin: int, end: int) -> float:
        each = prefix_ns(profile, end, rows, begin=begin)
        return costs.prefix * each / stages  # workers share the rows

    cache = run.config.cache
    kept, views = cache.directory is not None, cache.views or 1
    # The first passes of several views find nothing.
    passes = max(1, run.total_epochs - run.state.epoch - (views - 1)) + kept
    of_node = -(-workload.num_samples // run.info.num_nodes)

    near, on_node = inputs.rates.device, disk_sharers(inputs, shape[1])
    device_bytes = run.device_cache_bytes if run.keeps_copies else 0
    if held.plan is not None and held.plan.boundary == boundary:
        device_bytes = min(device_bytes, run.bytes_for_copies(held.plan))

    def prospect(at: int) -> Prospect:
        wide = max(1, profile.layers[at - 1].boundary_bytes_per_sample)
        copied = 0
        if near is not None:
            copied = min(of_node, on_node * device_bytes // (wide * views))
        return Prospect(
            boundary=at,
            prefix_ns=layers_ns(0, at),
            record_bytes=usual_bytes(wide, cache.codec),
            held=min(room.in_memory, of_node),
            samples=of_node,
            passes=passes,
            keeps=kept,
            copied=copied,
            copied_ns=0.0 if near is None else near.read_ns(wide),
        )

    found, caches_now, disk_now = prospect(boundary), None, None
    stored_on_disk: float | None = None
    if held.plan is not None and 0 < held.plan.boundary <= boundary:
        before = held.plan.boundary
        if held.caches and views == 1 and _holds_records(run):
            stored = layers_ns(before, boundary)
            found = dataclasses.replace(found, stored_ns=stored)
            stored_on_disk = stored if _holds_records(run, disk=True) else None
        if before == boundary and held.admission is not None:
            caches_now = held.admission.caches
            disk_now = held.admission.uses_disk
    learned = costs.slowed(rates)
    boundaries = [
        n for n in range(1, len(profile.layers)) if profile.may_be_boundary(n)
    ]
    pays_from = next(
        (n for n in boundaries if decide(learned, prospect(n)).caches), None
    )
    decision = decide(learned, found, caches_now=caches_now)
    below = None
    disk_rates = inputs.rates.disk
    if room.on_disk and disk_rates is not None:
        rest = active_ns(profile, boundary, rows)
        below = decide(
            costs.slowed_disk(disk_rates),
            on_disk(
                dataclasses.replace(
                    found,
                    stored_ns=stored_on_disk,
                    active_ns=costs.prefix * rest / stages,
                ),
                learned,
                held=room.on_disk,
                disk_bytes=bytes_on_disk(found.record_bytes),
                sharers=on_node,
            ),
            caches_now=disk_now,
            tier="disk",
        )
    return dataclasses.replace(decision, pays_from=pays_from, disk=below)


def _holds_records(run: Run, *, disk: bool = False) -> bool:
    cache = run.caches.training()
    if cache is None:
        return False
    return (cache.disk_used_bytes if disk else cache.used_bytes) > 0


def cluster_at(
    cluster: Cluster,
    profile: Profile,
    boundary: int,
    slots: int,
    admitted: Admission | None = None,
) -> Cluster:
    """Return the cluster with cache tiers that hold just as many samples.

    The slots of a slab fit the widest record with its header, whatever the boundary;
    plans count the bytes at the boundary alone. The engine reads what is in host memory
    before a step, and what is on disk alongside the steps before.

    Args:
        cluster: Of the run.
        profile: Of the layers.
        boundary: Index of the first active layer.
        slots: Samples that the cache holds; 0: none are read.
        admitted: The decision, with rates of reads; None: they count as free.
    """
    if boundary == 0 or slots == 0:
        return dataclasses.replace(cluster, cache=CacheTiers())
    wide = profile.layers[boundary - 1].boundary_bytes_per_sample
    if admitted is None:
        tiers = CacheTiers(host_bytes=slots * wide)
        return dataclasses.replace(cluster, cache=tiers)
    disk, (rate, record_ns) = admitted.disk, admitted.usual_rates
    tiers = CacheTiers(
        host_bytes=admitted.held * wide,
        host_bytes_per_s=rate,
        host_record_ns=record_ns,
        host_in_line=True,
    )
    if disk is not None and admitted.uses_disk:
        # Of a record there, in whole blocks; plans count it without.
        rate = disk.rates.bytes_per_s * wide // max(disk.record_bytes, 1)
        tiers = dataclasses.replace(
            tiers,
            disk_bytes=disk.held * wide,
            disk_bytes_per_s=max(1, rate),
        )
    return dataclasses.replace(cluster, cache=tiers)
