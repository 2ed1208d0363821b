"""From a profile and a cluster to the plan with the shortest predicted step."""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.planner import _binding, _reasons
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import LayerProfile, Profile
from pipetransformer.planner.plan import CHECKPOINT_MODES, Candidate, Plan

_CHECKPOINTS = {
    "never": _binding.PlannerCheckpoint.NEVER,
    "except_last": _binding.PlannerCheckpoint.EXCEPT_LAST,
    "always": _binding.PlannerCheckpoint.ALWAYS,
}


class InfeasiblePlan(ValueError):
    """No pipeline fits; the text names each length, its layer and what misses."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch: int,
    boundary: int = 0,
    num_stages: int | None = None,
    max_replicas: int | None = None,
    num_microbatches: int | None = None,
    cuts: Sequence[int] | None = None,
    checkpoint: str = "never",
    current: Plan | None = None,
    min_microbatch_samples: int = 1,
    prefix_cached: bool = False,
) -> Plan:
    """Find K, R, M and cuts with the shortest predicted GPipe step.

    Pure and deterministic: equal arguments give equal plans, on any machine.

    Args:
        profile: measured costs of the layers.
        cluster: devices, memory and links.
        global_batch: rows of a step over all replicas; constant, so the number of
            optimizer steps does not depend on the plan.
        boundary: index of the first active layer = number of frozen layers.
        num_stages: forces K.
        max_replicas: limits R; else R = nodes * floor(devices per node / K).
        num_microbatches: forces M.
        cuts: forces the cuts, layer indices from ``boundary`` to the number of
            layers; then K follows.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
        current: plan in use. Its (K, R, M) stays, with cuts for the new boundary,
            unless a candidate needs at most 98 % of its time or it does not fit.
        min_microbatch_samples: least rows of a micro-batch; 2 for batch norm.
        prefix_cached: the frozen layers' outputs come from the cache, so they cost
            no time (their weights still cost memory).

    Returns:
        The plan, with the candidates it beat and the reasons.

    Raises:
        InfeasiblePlan: nothing fits; names K, layer and missing bytes.
        TypeError: a count is no integer.
        ValueError: an option that no plan can satisfy; the text names it.

    Source: PipeTransformer (ICML 2021), section 3.2, with exact cuts by measured
    time in place of greedy ones by size.
    """
    if checkpoint not in _CHECKPOINTS:
        raise ValueError(
            f"checkpoint: expected one of {CHECKPOINT_MODES}, got {checkpoint!r}"
        )
    _check_integers(
        global_batch=global_batch,
        boundary=boundary,
        num_stages=num_stages,
        max_replicas=max_replicas,
        num_microbatches=num_microbatches,
        min_microbatch_samples=min_microbatch_samples,
    )
    request = _binding.PlannerRequest()
    workload = _binding.PlannerWorkload()
    workload.global_batch = global_batch
    workload.boundary = boundary
    workload.checkpoint = _CHECKPOINTS[checkpoint]
    workload.prefix_cached = prefix_cached
    request.workload = workload
    request.num_stages = num_stages
    request.max_replicas = max_replicas
    request.num_microbatches = num_microbatches
    request.cuts = None if cuts is None else list(cuts)
    request.min_microbatch_samples = min_microbatch_samples
    if current is not None:
        request.current = _binding.PlannerShape(*current.shape)
    result = _binding.planner_search(
        _native_profile(profile), _native_cluster(cluster), request
    )
    refusals = _reasons.refusals(result, profile, cluster, global_batch)
    if not result.candidates:
        raise InfeasiblePlan(
            "plan: expected a pipeline that fits, got none; " + "; ".join(refusals)
        )
    return _make_plan(result, profile, cluster, request, checkpoint, refusals)


def _check_integers(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int)
        ):
            raise TypeError(f"{name}: expected an integer, got {value!r}")
        if value is not None and abs(value) > 2**62:
            raise ValueError(f"{name}: expected at most 2**62, got {value}")


def _make_plan(
    result: _binding.PlannerResult,
    profile: Profile,
    cluster: Cluster,
    request: _binding.PlannerRequest,
    checkpoint: str,
    refusals: list[str],
) -> Plan:
    chosen = result.chosen
    shape = chosen.shape
    replica_rows = -(-request.workload.global_batch // shape.num_replicas)
    devices = cluster.num_nodes * cluster.devices_per_node
    idle_devices = devices - shape.num_replicas * shape.num_stages
    return Plan(
        boundary=request.workload.boundary,
        num_stages=shape.num_stages,
        num_replicas=shape.num_replicas,
        num_microbatches=shape.num_microbatches,
        samples_per_microbatch=-(-replica_rows // shape.num_microbatches),
        cuts=tuple(chosen.cuts),
        checkpoint=checkpoint,
        predicted_step_ns=chosen.step_ns,
        bytes_per_stage=tuple(chosen.bytes_per_stage),
        idle_devices=idle_devices,
        candidates=_candidates(result),
        reasons=(*_reasons.choice(result, cluster, request, idle_devices), *refusals),
        profile_hash=profile.hash,
    )


def _candidates(result: _binding.PlannerResult) -> tuple[Candidate, ...]:
    chosen = result.chosen
    others = [c for c in result.candidates if not _reasons.same(c, chosen)]
    most = len(result.candidates)
    return tuple(
        Candidate(
            num_stages=candidate.shape.num_stages,
            num_replicas=candidate.shape.num_replicas,
            num_microbatches=candidate.shape.num_microbatches,
            cuts=tuple(candidate.cuts),
            predicted_step_ns=candidate.step_ns,
            lost=_reasons.lost(candidate, chosen),
        )
        for candidate in [chosen, *others][:most]
    )


def _native_profile(profile: Profile) -> _binding.PlannerProfile:
    native = _binding.PlannerProfile()
    native.microbatch_samples = list(profile.microbatch_samples)
    native.layers = [_native_layer(layer) for layer in profile.layers]
    native.tied_layers = list(profile.tied_layers)
    return native


def _native_layer(layer: LayerProfile) -> _binding.PlannerLayer:
    native = _binding.PlannerLayer()
    native.forward_ns = list(layer.forward_ns)
    native.input_grad_ns = list(layer.input_grad_ns)
    native.weight_grad_ns = list(layer.weight_grad_ns)
    native.forward_only_ns = list(layer.forward_only_ns or layer.forward_ns)
    native.parameter_bytes = layer.parameter_bytes
    native.activation_bytes_per_sample = layer.activation_bytes_per_sample
    native.boundary_bytes_per_sample = layer.boundary_bytes_per_sample
    native.trainable = layer.trainable
    return native


def _native_cluster(cluster: Cluster) -> _binding.PlannerCluster:
    native = _binding.PlannerCluster()
    native.num_nodes = cluster.num_nodes
    native.devices_per_node = cluster.devices_per_node
    native.device_memory_bytes = cluster.device_memory_bytes
    native.device_link_bytes_per_s = cluster.device_link_bytes_per_s
    native.device_link_latency_ns = cluster.device_link_latency_ns
    native.network_bytes_per_s = cluster.network_bytes_per_s
    native.network_latency_ns = cluster.network_latency_ns
    native.optimizer_bytes_per_parameter_byte = (
        cluster.optimizer_bytes_per_parameter_byte
    )
    native.context_bytes = cluster.context_bytes
    return native
