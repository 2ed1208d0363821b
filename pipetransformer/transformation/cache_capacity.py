"""What the activation cache will serve of a frozen prefix, as plans receive it."""

from __future__ import annotations

import dataclasses

from pipetransformer.autocache import cacheable
from pipetransformer.planner import CacheTiers, Cluster, Profile
from pipetransformer.replica.frozen_prefix import FrozenPrefix
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


def cluster_at(
    cluster: Cluster, profile: Profile, boundary: int, slots: int
) -> Cluster:
    """Return the cluster with a host tier that holds just as many samples.

    The slots of a slab fit the widest record with its header, whatever the boundary;
    plans count the bytes at the boundary alone.
    """
    if boundary == 0 or slots == 0:
        return dataclasses.replace(cluster, cache=CacheTiers())
    wide = profile.layers[boundary - 1].boundary_bytes_per_sample
    return dataclasses.replace(cluster, cache=CacheTiers(host_bytes=slots * wide))
