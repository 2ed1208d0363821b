"""Plain values of the planner's Python side as those of its C++ side, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pipetransformer import _C
from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import LayerProfile, Profile
from pipetransformer.planner.options import SearchOptions
from pipetransformer.planner.plan import Plan

_T = TypeVar("_T")

SCHEDULES = {
    "gpipe": _C.planner.ScheduleKind.GPIPE,
    "1f1b": _C.planner.ScheduleKind.ONE_F_ONE_B,
    "zb-h1": _C.planner.ScheduleKind.ZB_H1,
}
PLACEMENTS = {
    "none": _C.planner.PrefixPlacement.NONE,
    "replicated": _C.planner.PrefixPlacement.REPLICATED,
    "pipelined": _C.planner.PrefixPlacement.PIPELINED,
    "filled": _C.planner.PrefixPlacement.FILLED,
}
TIERS = {
    "none": _C.planner.CacheTier.NONE,
    "device": _C.planner.CacheTier.DEVICE,
    "host": _C.planner.CacheTier.HOST,
    "disk": _C.planner.CacheTier.DISK,
}
_CHECKPOINTS = {
    "never": _C.planner.Checkpoint.NEVER,
    "except_last": _C.planner.Checkpoint.EXCEPT_LAST,
    "always": _C.planner.Checkpoint.ALWAYS,
}
_COPIES = {
    "overlapped": _C.planner.CopyModel.OVERLAPPED,
    "serial": _C.planner.CopyModel.SERIAL,
}


def name_of(choices: Mapping[str, _T], value: _T) -> str:
    """Return the name of a C++ value."""
    return next(name for name, known in choices.items() if known == value)


def workload(asked: SearchOptions | Plan, boundary: int) -> _C.planner.Workload:
    """Return what is to be run."""
    native = _C.planner.Workload()
    native.global_batch = asked.global_batch
    native.boundary = boundary
    native.checkpoint = _CHECKPOINTS[asked.checkpoint]
    native.copies = _COPIES[asked.copies]
    native.num_samples = asked.num_samples
    native.accumulation_steps = asked.accumulation_steps
    return native


def choice(plan: Plan | Candidate) -> _C.planner.Choice:
    """Return how it is run."""
    return _C.planner.Choice(
        _C.planner.Shape(*plan.shape),
        SCHEDULES[plan.schedule],
        PLACEMENTS[plan.prefix],
        TIERS[plan.cache],
        list(plan.cuts),
    )


def profile(value: Profile) -> _C.planner.Profile:
    """Return a profile."""
    native = _C.planner.Profile()
    native.microbatch_samples = list(value.microbatch_samples)
    native.layers = [_layer(layer) for layer in value.layers]
    native.tied_layers = list(value.tied_layers)
    native.skips = list(value.skips)
    return native


def prefix_cuts(value: Profile, plan: Plan) -> tuple[int, ...]:
    """Return the cuts of a pipelined prefix into chunks, one for each device at most.

    Args:
        value: of all layers.
        plan: with frozen layers; the slowest chunk is as fast as possible for its
            micro-batches.
    """
    cuts = _C.planner.prefix_cuts(
        profile(value), plan.boundary, plan.samples_per_microbatch, plan.num_stages
    )
    return tuple(cuts)


def _layer(layer: LayerProfile) -> _C.planner.Layer:
    native = _C.planner.Layer()
    native.forward_ns = list(layer.forward_ns)
    native.input_grad_ns = list(layer.input_grad_ns)
    native.weight_grad_ns = list(layer.weight_grad_ns)
    native.forward_only_ns = list(layer.forward_only_ns or layer.forward_ns)
    native.parameter_bytes = layer.parameter_bytes
    native.trainable_bytes = layer.gradient_bytes
    native.activation_bytes_per_sample = layer.activation_bytes_per_sample
    native.weight_grad_activation_bytes_per_sample = (
        layer.weight_grad_activation_bytes_per_sample
    )
    native.activation_bytes_per_microbatch = layer.activation_bytes_per_microbatch
    native.shared_activation_bytes = layer.shared_activation_bytes
    native.boundary_bytes_per_sample = layer.boundary_bytes_per_sample
    native.trainable = layer.trainable
    native.optimizer_ns = layer.optimizer_ns
    native.optimizer_bytes = layer.optimizer_bytes
    return native


def cluster(value: Cluster) -> _C.planner.Cluster:
    """Return a cluster."""
    native = _C.planner.Cluster()
    native.num_nodes = value.num_nodes
    native.devices_per_node = value.devices_per_node
    native.device_memory_bytes = value.device_memory_bytes
    native.device_link_bytes_per_s = value.device_link_bytes_per_s
    native.device_link_latency_ns = value.device_link_latency_ns
    native.network_bytes_per_s = value.network_bytes_per_s
    native.network_latency_ns = value.network_latency_ns
    native.optimizer_bytes_per_parameter_byte = value.optimizer_bytes_per_parameter_byte
    native.context_bytes = value.context_bytes
    native.cores_permille = value.cores_permille
    native.replica_link_bytes_per_s = value.replica_link_bytes_per_s
    native.replica_link_latency_ns = value.replica_link_latency_ns
    native.step_ns = value.step_ns
    native.row_ns = value.row_ns
    if value.cache is not None:
        tiers = _C.planner.CacheTiers()
        tiers.host_bytes = value.cache.host_bytes
        tiers.host_bytes_per_s = value.cache.host_bytes_per_s
        tiers.disk_bytes = value.cache.disk_bytes
        tiers.disk_bytes_per_s = value.cache.disk_bytes_per_s
        tiers.host_record_ns = value.cache.host_record_ns
        tiers.host_in_line = value.cache.host_in_line
        native.cache = tiers
    return native


def step_costs(
    plan: Plan, profile_: Profile, cluster_: Cluster
) -> _C.planner.StepCosts:
    """Return what a step of the plan costs by stage.

    Raises:
        ValueError: the plan does not fit the profile or the cluster.
    """
    return _C.planner.step_costs(
        profile(profile_),
        cluster(cluster_),
        workload(plan, plan.boundary),
        choice(plan),
    )
