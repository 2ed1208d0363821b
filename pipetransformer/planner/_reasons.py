"""Sentences that explain a search result; integer arithmetic, so reproducible."""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer import _C
from pipetransformer.planner import native
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import Profile
from pipetransformer.planner.options import SearchOptions


def lost(candidate: _C.planner.Candidate, chosen: _C.planner.Candidate) -> str:
    """Why ``candidate`` was not chosen."""
    slower = candidate.simulated_ns - chosen.simulated_ns
    if slower == 0:
        return (
            "equal step time: ties go to fewer stages, the first cuts, more replicas, "
            "then fewer micro-batches"
        )
    return f"{_percent(slower, chosen.simulated_ns)} slower"


def choice(
    result: _C.planner.Result,
    cluster: Cluster,
    request: _C.planner.Request,
    idle_devices: int,
) -> list[str]:
    """Why the chosen candidate won, and what it uses."""
    chosen, *others = result.candidates
    step = f"simulated step {_milliseconds(chosen.simulated_ns)}"
    name = _name(chosen)
    if others:
        behind = "as fast"
        if others[0].simulated_ns > chosen.simulated_ns:
            slower = others[0].simulated_ns - chosen.simulated_ns
            behind = f"{_percent(slower, chosen.simulated_ns)} slower"
        sentences = [
            f"{name} has the shortest {step}; next is {_name(others[0])}, {behind}"
        ]
    else:
        sentences = [f"{name} is the only one that fits, {step}"]
    if result.exhaustive:
        sentences.append(
            "nothing else that was allowed simulates faster: all cuts were bounded or "
            "simulated"
        )
    shape = (chosen.choice.shape.num_stages, chosen.choice.shape.num_replicas)
    return [
        *sentences,
        *more_devices(
            shape,
            chosen.simulated_ns,
            [(_devices(each), each.simulated_ns, _name(each)) for each in others],
        ),
        *use(
            chosen.bytes_per_stage, shape, cluster, request.max_replicas, idle_devices
        ),
    ]


def more_devices(
    shape: tuple[int, int], step_ns: int, others: Sequence[tuple[int, int, str]]
) -> list[str]:
    """What the fastest plan with more devices would take, if that is longer.

    Args:
        shape: K and R of the chosen plan.
        step_ns: its simulated step.
        others: devices, simulated step and name of those it was compared with.
    """
    fuller = [(ns, name) for count, ns, name in others if count > shape[0] * shape[1]]
    if not fuller or min(fuller)[0] <= step_ns:
        return []
    ns, name = min(fuller)
    return [f"more devices take longer: {name}, {_percent(ns - step_ns, step_ns)}"]


def use(
    bytes_per_stage: Sequence[int],
    shape: tuple[int, int],
    cluster: Cluster,
    max_replicas: int | None,
    idle_devices: int,
) -> list[str]:
    """What a plan of (K, R) takes of the cluster, and what it leaves unused."""
    num_stages, num_replicas = shape
    fullest = max(bytes_per_stage)
    sentences = [
        f"the fullest stage, {list(bytes_per_stage).index(fullest)}, needs {fullest} "
        f"of {cluster.device_memory_bytes} bytes"
    ]
    if idle_devices:
        cause = f"K={num_stages} on {cluster.devices_per_node} per node"
        room = cluster.num_nodes * (cluster.devices_per_node // num_stages)
        most = room if max_replicas is None else min(room, max_replicas)
        if max_replicas == num_replicas:
            cause = f"at most {max_replicas} replicas"
        elif num_replicas < most:
            cause = f"{num_replicas} of {most} replicas that there may be"
        devices = "1 device" if idle_devices == 1 else f"{idle_devices} devices"
        sentences.append(f"{devices} idle: {cause}")
    return sentences


def refusals(
    result: _C.planner.Result,
    profile: Profile,
    cluster: Cluster,
    asked: SearchOptions,
) -> list[str]:
    """Why each infeasible pipeline length is out."""
    return [_refusal(r, profile, cluster, asked) for r in result.refusals]


def _refusal(
    refusal: _C.planner.Refusal,
    profile: Profile,
    cluster: Cluster,
    asked: SearchOptions,
) -> str:
    k = f"K={refusal.shape.num_stages}"
    causes = _C.planner.RefusalCause
    if refusal.cause == causes.SHARED_PARAMETERS:
        return f"{k} does not fit: layers that share a parameter leave too few cuts"
    if refusal.cause == causes.BATCH:
        hint = "; fewer would fit (max_replicas, or a smaller min_replicas)"
        least = asked.min_microbatch_samples
        rows = "a row" if least == 1 else f"{least} rows (batch norm, or as asked)"
        return (
            f"{k} does not fit: replicas x micro-batches: expected at least {rows} for "
            f"each at a global batch of {asked.global_batch}, got "
            f"{refusal.shape.num_replicas} x {refusal.shape.num_microbatches}"
            f"{hint if refusal.shape.num_replicas > 1 else ''}"
        )
    if refusal.cause == causes.FIXED_MEMORY:
        return (
            f"{k} does not fit: context and frozen layers alone miss "
            f"{refusal.missing_bytes} bytes of {cluster.device_memory_bytes}"
        )
    largest = profile.layers[refusal.layer].name
    return (
        f"{k} does not fit: layers {refusal.stage_begin}-{refusal.stage_end - 1} miss "
        f"{refusal.missing_bytes} bytes of {cluster.device_memory_bytes}, the largest "
        f"is layer {refusal.layer} ({largest})"
    )


def _name(candidate: _C.planner.Candidate) -> str:
    choice, shape = candidate.choice, candidate.choice.shape
    text = (
        f"K={shape.num_stages} R={shape.num_replicas} M={shape.num_microbatches} "
        f"{native.name_of(native.SCHEDULES, choice.schedule)}"
    )
    tier = native.name_of(native.TIERS, choice.cache)
    return text if tier == "none" else f"{text}, {tier} cache"


def _devices(candidate: _C.planner.Candidate) -> int:
    shape = candidate.choice.shape
    return shape.num_stages * shape.num_replicas


def _percent(part: int, whole: int) -> str:
    permille = part * 1000 // max(whole, 1)
    return f"{permille // 10}.{permille % 10} %"


def _milliseconds(nanoseconds: int) -> str:
    microseconds = nanoseconds // 1000
    return f"{microseconds // 1000}.{microseconds % 1000:03d} ms"
