"""Sentences that explain a search result; integer arithmetic, so reproducible."""

from __future__ import annotations

from pipetransformer.planner import _binding
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import Profile


def same(a: _binding.PlannerCandidate, b: _binding.PlannerCandidate) -> bool:
    """Whether two candidates have the same shape (then they are the same)."""
    return _shape(a.shape) == _shape(b.shape)


def lost(
    candidate: _binding.PlannerCandidate, chosen: _binding.PlannerCandidate
) -> str:
    """Why ``candidate`` was not chosen; empty for the chosen one."""
    if same(candidate, chosen):
        return ""
    if candidate.step_ns < chosen.step_ns:
        gain = _percent(chosen.step_ns - candidate.step_ns, chosen.step_ns)
        return f"{gain} faster than the current shape: less than 2 %"
    if candidate.step_ns == chosen.step_ns:
        return "equal step time: ties go to the first cuts, then to fewer micro-batches"
    slower = _percent(candidate.step_ns - chosen.step_ns, chosen.step_ns)
    return f"{slower} slower"


def choice(
    result: _binding.PlannerResult,
    cluster: Cluster,
    request: _binding.PlannerRequest,
    idle_devices: int,
) -> list[str]:
    """Why the chosen shape won, and what it leaves unused."""
    chosen = result.chosen
    name = _shape_text(chosen.shape)
    step = f"predicted step {_milliseconds(chosen.step_ns)}"
    others = [c for c in result.candidates if not same(c, chosen)]
    if result.kept_current:
        best = others[0]
        gain = _percent(chosen.step_ns - best.step_ns, chosen.step_ns)
        sentences = [
            f"{name} kept, {step}: {_shape_text(best.shape)} would be {gain} faster, "
            "a new shape must be 2 % faster"
        ]
    elif others:
        behind = _percent(others[0].step_ns - chosen.step_ns, chosen.step_ns)
        sentences = [
            f"{name} has the shortest {step}; next is "
            f"{_shape_text(others[0].shape)}, {behind} slower"
        ]
    else:
        sentences = [f"{name} is the only shape that fits, {step}"]
    sizes = chosen.bytes_per_stage
    sentences.append(
        f"the fullest stage, {sizes.index(max(sizes))}, needs {max(sizes)} of "
        f"{cluster.device_memory_bytes} bytes"
    )
    if idle_devices:
        cause = f"K={chosen.shape.num_stages} on {cluster.devices_per_node} per node"
        if request.max_replicas == chosen.shape.num_replicas:
            cause = f"at most {request.max_replicas} replicas"
        sentences.append(f"{idle_devices} devices idle: {cause}")
    return sentences


def refusals(
    result: _binding.PlannerResult,
    profile: Profile,
    cluster: Cluster,
    global_batch: int,
) -> list[str]:
    """Why each infeasible pipeline length is out."""
    return [_refusal(r, profile, cluster, global_batch) for r in result.refusals]


def _refusal(
    refusal: _binding.PlannerRefusal,
    profile: Profile,
    cluster: Cluster,
    global_batch: int,
) -> str:
    k = f"K={refusal.shape.num_stages}"
    causes = _binding.PlannerRefusalCause
    if refusal.cause == causes.SHARED_PARAMETERS:
        return f"{k} does not fit: layers that share a parameter leave too few cuts"
    if refusal.cause == causes.BATCH:
        return (
            f"{k} does not fit: replicas x micro-batches: expected enough rows for "
            f"each at a global batch of {global_batch}, got "
            f"{refusal.shape.num_replicas} x {refusal.shape.num_microbatches}"
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


def _shape(shape: _binding.PlannerShape) -> tuple[int, int, int]:
    return shape.num_stages, shape.num_replicas, shape.num_microbatches


def _shape_text(shape: _binding.PlannerShape) -> str:
    k, r, m = _shape(shape)
    return f"K={k} R={r} M={m}"


def _percent(part: int, whole: int) -> str:
    permille = part * 1000 // max(whole, 1)
    return f"{permille // 10}.{permille % 10} %"


def _milliseconds(nanoseconds: int) -> str:
    microseconds = nanoseconds // 1000
    return f"{microseconds // 1000}.{microseconds % 1000:03d} ms"
