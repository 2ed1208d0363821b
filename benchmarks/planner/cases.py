"""What planner_time.py times: solvers alone, sweeps of them, and whole searches."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pipetransformer.planner import Cluster, LayerProfile, Profile, search
from pipetransformer.testing.solvers import (
    Costs,
    Limits,
    best_cuts,
    gpipe_staircase,
    min_max_cuts,
)
from planner.layer_rows import random_row

Case = Callable[[], object]

SOLVER_SIZES = ((1_000, 64), (4_000, 64), (10_000, 64), (10_000, 512))
SWEEP_LAYERS = (50, 200, 1_000)
MOST_STAGES = 64
NUM_MICROBATCH_COUNTS = 8
DEVICES = (16, 1_000, 10_000)
SCHEDULES = ("gpipe", "1f1b", "zb-h1")

ROWS_PER_DEVICE = 12  # of the global batch
MEGABYTE = 2**20
SAMPLES = (1, 4, 16)
# Milliseconds on one core that a case should stay within; others are reported.
TARGETS_MS = {"min-max, L=1000 K=64": 25.0, "search, L=200 K=1..64": 300.0}


def cases(seed: int, *, quick: bool) -> dict[str, Case]:
    """Return every case by name; equal seeds give equal input.

    Args:
        seed: Of all rows of layers.
        quick: Leave out the longest.
    """
    found: dict[str, Case] = {}
    for num_layers, num_stages in SOLVER_SIZES[: 2 if quick else None]:
        size = f"L={num_layers} K={num_stages}"
        found[f"min-max, {size}"] = _min_max(num_layers, num_stages, seed)
    size = "L=1000 K=64" if quick else "L=10000 K=64"
    found[f"staircase, {size}"] = _staircase(1_000 if quick else 10_000, seed)
    for num_layers in SWEEP_LAYERS[: 2 if quick else None]:
        size = f"L={num_layers} K=1..{min(num_layers, MOST_STAGES)}"
        name = f"{NUM_MICROBATCH_COUNTS} staircases per K, {size}"
        found[name] = _sweep(num_layers, seed)
        profile = random_profile(num_layers, seed)
        one_node = random_cluster(MOST_STAGES, 1, profile)
        found[f"search, {size}"] = _search(profile, one_node, ("gpipe",))
        found[f"search, {size}, 3 schedules"] = _search(profile, one_node, SCHEDULES)
    profile = random_profile(50, seed)
    for num_devices in DEVICES:
        machines = random_cluster(8, num_devices // 8, profile)
        found[f"search, L=50, {num_devices} devices"] = _search(
            profile, machines, ("gpipe",)
        )
    found["best cuts, L=200 K=64"] = _best_cuts(200, 64, seed)
    return found


def random_profile(num_layers: int, seed: int) -> Profile:
    """Return layers whose time grows with the micro-batch from a fixed part."""
    rng = random.Random(seed)
    times = random_row("lognormal", seed, num_layers=num_layers).times

    def layer(index: int) -> LayerProfile:
        forward = tuple(times[index] // 8 + times[index] * m for m in SAMPLES)
        return LayerProfile(
            name=f"{index}.Layer",
            forward_ns=forward,
            input_grad_ns=forward,
            weight_grad_ns=tuple(int(f * rng.uniform(0.7, 1.1)) for f in forward),
            parameter_bytes=rng.randint(1, 16) * MEGABYTE,
            activation_bytes_per_sample=rng.randint(1, 8) * MEGABYTE // 4,
            weight_grad_activation_bytes_per_sample=MEGABYTE // 8,
            boundary_bytes_per_sample=rng.randint(1, 4) * MEGABYTE // 8,
        )

    layers = tuple(layer(i) for i in range(num_layers))
    return Profile(name="random", microbatch_samples=SAMPLES, layers=layers)


def random_cluster(devices_per_node: int, num_nodes: int, profile: Profile) -> Cluster:
    """Return nodes whose devices hold a part of the model and its activations.

    That is a quarter of the weights, gradients and moments, and twice the even share
    of what a replica keeps under GPipe.
    """
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    kept = ROWS_PER_DEVICE * sum(
        layer.activation_bytes_per_sample for layer in profile.layers
    )
    return Cluster(
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device_memory_bytes=parameters + 2 * kept,
        device_link_bytes_per_s=16 * 10**9,
        device_link_latency_ns=5_000,
        network_bytes_per_s=5 * 10**9,
        network_latency_ns=10_000,
    )


def _search(profile: Profile, machines: Cluster, schedules: tuple[str, ...]) -> Case:
    batch = ROWS_PER_DEVICE * machines.num_nodes * machines.devices_per_node
    return partial(search, profile, machines, global_batch=batch, schedules=schedules)


def _half_full(bytes_: list[int], num_stages: int) -> Limits:
    return Limits(bytes_, max(2 * sum(bytes_) // num_stages, max(bytes_)))


def _min_max(num_layers: int, num_stages: int, seed: int) -> Case:
    row = random_row("uniform", seed, num_layers=num_layers)
    limits = _half_full(list(row.parameters), num_stages)
    return partial(min_max_cuts, row.times, num_stages, limits=limits)


def _staircase(num_layers: int, seed: int) -> Case:
    row = random_row("uniform", seed, num_layers=num_layers)
    rng = random.Random(seed)
    backward = [int(time * rng.uniform(1.5, 2.5)) for time in row.times]
    limits = _half_full(list(row.parameters), 64)
    return partial(gpipe_staircase, row.times, backward, 64, limits=limits)


def _sweep(num_layers: int, seed: int) -> Case:
    """Solve every K for as many rows of times as a search has counts M."""
    row = random_row("uniform", seed, num_layers=num_layers)
    rng = random.Random(seed)
    ratios = [rng.uniform(1.5, 2.5) for _ in row.times]
    calls: list[Case] = []
    for count in range(1, NUM_MICROBATCH_COUNTS + 1):
        forward = [time // count + 1_000 for time in row.times]
        backward = [int(f * r) for f, r in zip(forward, ratios, strict=True)]
        for num_stages in range(1, min(num_layers, MOST_STAGES) + 1):
            limits = _half_full(list(row.parameters), num_stages)
            call = partial(
                gpipe_staircase, forward, backward, num_stages, limits=limits
            )
            calls.append(call)
    return lambda: [call() for call in calls]


def _best_cuts(num_layers: int, num_stages: int, seed: int) -> Case:
    row = random_row("skips", seed, num_layers=num_layers)
    rng = random.Random(seed)
    backward = [int(time * rng.uniform(1.5, 2.5)) for time in row.times]
    slack = [sum(backward[:i]) for i in range(num_layers + 1)]
    return partial(
        best_cuts,
        Costs(row.times, row.copies, overlapped=True),
        Costs(backward, row.copies, overlapped=True),
        num_stages,
        repeats=4 * num_stages - 1,
        cut_costs=[2 * copy for copy in row.copies],
        reduce_costs=[10 * time for time in row.times],
        reduce_slack=slack,
    )
