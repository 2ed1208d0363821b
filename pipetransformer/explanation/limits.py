"""Finds the resource that limits a plan: makes each twice as good, simulates again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from pipetransformer.core.wire import LARGEST_INT
from pipetransformer.explanation.report import Limit
from pipetransformer.planner import (
    Cluster,
    InfeasiblePlan,
    LayerProfile,
    Plan,
    Profile,
    SearchOptions,
    search,
)
from pipetransformer.simulator import simulate


def find_limits(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    step_ns: int,
    options: SearchOptions,
) -> tuple[Limit, ...]:
    """Return what each resource would save of a step, were it twice as good.

    Args:
        plan: the plan; it stays, but for memory, where the planner is asked again.
        profile: its layers.
        cluster: its machines.
        step_ns: the plan's simulated step.
        options: what the planner may choose from, nothing of it forced.

    Returns:
        Largest gain first; among equals the order stages, prefix, links, cache,
        memory.
    """
    found = [
        Limit(
            resource=resource,
            change=change,
            step_ns=faster,
            gain_ns=max(0, step_ns - faster),
        )
        for resource, change, faster in _variants(plan, profile, cluster)
    ]
    memory = _more_memory(plan, profile, cluster, step_ns, options)
    if memory is not None:
        found.append(memory)
    return tuple(sorted(found, key=lambda limit: -limit.gain_ns))


def _variants(
    plan: Plan, profile: Profile, cluster: Cluster
) -> Iterator[tuple[str, str, int]]:
    for stage, (begin, end) in enumerate(pairwise(plan.cuts)):
        faster = _with_fast_layers(profile, begin, end)
        change = "its device computes twice as fast"
        yield f"stage {stage}", change, _step_ns(plan, faster, cluster)
    if plan.prefix != "none":
        faster = _with_fast_layers(profile, 0, plan.boundary)
        change = "the frozen layers take half the time"
        yield "prefix", change, _step_ns(plan, faster, cluster)
    gained = "twice the rate and half the latency between"
    if cluster.device_link_bytes_per_s is not None:
        faster_link = _fast_link(cluster, "device_link")
        change = f"{gained} devices of a node"
        yield "device link", change, _step_ns(plan, profile, faster_link)
    if cluster.replica_link_bytes_per_s is not None:
        faster_link = _fast_link(cluster, "replica_link")
        change = f"{gained} replicas of a node"
        yield "replica link", change, _step_ns(plan, profile, faster_link)
    if cluster.network_bytes_per_s is not None and cluster.num_nodes > 1:
        faster_link = _fast_link(cluster, "network")
        change = f"{gained} nodes"
        yield "network", change, _step_ns(plan, profile, faster_link)
    if plan.cache in ("host", "disk") and cluster.cache is not None:
        change = f"the {plan.cache} cache is read twice as fast"
        yield "cache", change, _step_ns(plan, profile, _fast_cache(cluster))


def _more_memory(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    step_ns: int,
    options: SearchOptions,
) -> Limit | None:
    """Return what memory saves beyond what planning again saves without it."""
    memory = _twice(cluster.device_memory_bytes)
    roomy = replace(cluster, device_memory_bytes=memory)
    try:
        best = search(profile, roomy, options, boundary=plan.boundary)
    except InfeasiblePlan:  # the batch, or cuts that parameters forbid
        return None
    with contextlib.suppress(InfeasiblePlan):
        again = search(profile, cluster, options, boundary=plan.boundary)
        step_ns = min(step_ns, again.simulated_step_ns)
    return Limit(
        resource="memory",
        change=f"twice the memory and planned again: {best.describe()}",
        step_ns=best.simulated_step_ns,
        gain_ns=max(0, step_ns - best.simulated_step_ns),
    )


def _step_ns(plan: Plan, profile: Profile, cluster: Cluster) -> int:
    return simulate(plan, profile, cluster).step_ns


def _with_fast_layers(profile: Profile, begin: int, end: int) -> Profile:
    layers = tuple(
        _fast_layer(layer) if begin <= index < end else layer
        for index, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers)


def _fast_layer(layer: LayerProfile) -> LayerProfile:
    alone = layer.forward_only_ns
    return replace(
        layer,
        forward_ns=_half(layer.forward_ns),
        input_grad_ns=_half(layer.input_grad_ns),
        weight_grad_ns=_half(layer.weight_grad_ns),
        forward_only_ns=None if alone is None else _half(alone),
    )


def _half(times: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(ns // 2 for ns in times)


def _twice(value: int) -> int:
    return min(2 * value, LARGEST_INT)


def _fast_link(
    cluster: Cluster, link: Literal["device_link", "replica_link", "network"]
) -> Cluster:
    rate, latency = f"{link}_bytes_per_s", f"{link}_latency_ns"
    faster: dict[str, Any] = {
        rate: _twice(getattr(cluster, rate)),
        latency: getattr(cluster, latency) // 2,
    }
    return replace(cluster, **faster)


def _fast_cache(cluster: Cluster) -> Cluster:
    tiers = cluster.cache
    if tiers is None:
        return cluster
    faster = replace(
        tiers,
        host_bytes_per_s=_twice(tiers.host_bytes_per_s),
        host_record_ns=tiers.host_record_ns // 2,
        disk_bytes_per_s=_twice(tiers.disk_bytes_per_s),
    )
    return replace(cluster, cache=faster)
