"""What the activation cache will serve of a frozen prefix, as plans receive it."""

from __future__ import annotations

import dataclasses

from pipetransformer.autocache import (
    Admission,
    Prospect,
    TierRates,
    cacheable,
    decide,
    usual_bytes,
)
from pipetransformer.planner import CacheTiers, Cluster, Profile
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.run.cache_costs import prefix_ns, prefix_rows
from pipetransformer.run.context import Run


def cache_slots(run: Run, boundary: int, prefix: FrozenPrefix | None) -> int:
    """Return how many samples this node's slab holds at a boundary.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer.
        prefix: The frozen layers in force, which know more than their modules tell.

    Returns:
        Records, 0 where frozen layers run for every batch: the cache is off, could
        not be made, or must not be used for these layers.
    """
    if not run.config.cache.enabled or boundary == 0:
        return 0
    if cacheable(list(run.arguments.model)[:boundary], frozen=False) is not None:
        return 0
    if prefix is not None and prefix.boundary == boundary and prefix.refusal:
        return 0
    return run.caches.training_slots()


def admission(run: Run, boundary: int, slots: int) -> Admission | None:
    """Decide by cost whether a boundary's activations are kept, as this rank sees it.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer.
        slots: From `cache_slots`.

    Returns:
        The decision; None where there is nothing to decide: no cache, or no rates,
        since it is to be used whatever it costs or they could not be measured.
    """
    inputs, costs, held = run.inputs, run.costs.cache, run.in_force
    profile, workload, rates = inputs.profile, inputs.workload, inputs.rates
    if slots == 0 or rates is None:
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

    def prospect(at: int) -> Prospect:
        return Prospect(
            boundary=at,
            prefix_ns=layers_ns(0, at),
            record_bytes=usual_bytes(
                profile.layers[at - 1].boundary_bytes_per_sample, cache.codec
            ),
            held=min(slots, of_node),
            samples=of_node,
            passes=passes,
            keeps=kept,
        )

    found, caches_now = prospect(boundary), None
    if held.plan is not None and 0 < held.plan.boundary <= boundary:
        before = held.plan.boundary
        if held.caches and views == 1 and _holds_records(run):
            stored = layers_ns(before, boundary)
            found = dataclasses.replace(found, stored_ns=stored)
        if before == boundary and held.admission is not None:
            caches_now = held.admission.caches
    learned = costs.slowed(rates)
    boundaries = [
        n for n in range(1, len(profile.layers)) if profile.may_be_boundary(n)
    ]
    pays_from = next(
        (n for n in boundaries if decide(learned, prospect(n)).caches), None
    )
    decision = decide(learned, found, caches_now=caches_now)
    return dataclasses.replace(decision, pays_from=pays_from)


def _holds_records(run: Run) -> bool:
    cache = run.caches.training()
    return cache is not None and cache.used_bytes > 0


def cluster_at(
    cluster: Cluster,
    profile: Profile,
    boundary: int,
    slots: int,
    rates: TierRates | None = None,
) -> Cluster:
    """Return the cluster with a host tier that holds just as many samples.

    The slots of a slab fit the widest record with its header, whatever the boundary;
    plans count the bytes at the boundary alone. The engine reads them before a step.

    Args:
        cluster: Of the run.
        profile: Of the layers.
        boundary: Index of the first active layer.
        slots: Samples that the slab holds; 0: none are read.
        rates: Of reads; None: they count as free.
    """
    if boundary == 0 or slots == 0:
        return dataclasses.replace(cluster, cache=CacheTiers())
    wide = profile.layers[boundary - 1].boundary_bytes_per_sample
    tiers = CacheTiers(host_bytes=slots * wide)
    if rates is not None:
        tiers = dataclasses.replace(
            tiers,
            host_bytes_per_s=rates.bytes_per_s,
            host_record_ns=rates.record_ns,
            host_in_line=True,
        )
    return dataclasses.replace(cluster, cache=tiers)
