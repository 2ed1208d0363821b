"""The chosen plan against every other one, played by the simulator."""

import random

import pytest

from pipetransformer.planner import InfeasiblePlan, search
from tests.planner.instances import (
    all_cuts,
    cluster,
    layer,
    profile,
    random_costs,
)

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
PLACEMENTS = ("replicated", "pipelined", "filled")


def instance(rng, most_layers):
    """A model with copies, all-reduces, a frozen prefix, ties, tight memory."""
    n = rng.randint(2, most_layers)
    columns = [random_costs(rng, n) for _ in range(3)]
    frozen = rng.choice([0, 0, rng.randint(0, n - 1)])
    layers = [
        layer(
            i,
            times=times,
            parameters=rng.randint(0, 50),
            activation=rng.randint(0, 4),
            boundary_bytes_per_sample=rng.choice([0, 5, 40]),
            trainable=i >= rng.choice([0, 0, 1, 2]),
        )
        for i, times in enumerate(zip(*columns, strict=True))
    ]
    tied = ()
    if n - frozen > 3 and rng.random() < 0.2:
        first = rng.randint(frozen, n - 2)
        tied = ((first, first + 1),)
    state = sum(4 * each.parameter_bytes for each in layers)
    machines = cluster(
        4,
        rng.choice([1 << 40, int(state * rng.uniform(0.4, 1.5)) + 200]),
        num_nodes=rng.choice([1, 1, 2]),
        device_link_bytes_per_s=rng.choice([None, 10**9]),
        network_bytes_per_s=rng.choice([None, 10**9]),
    )
    options = dict(
        global_batch=48,
        boundary=frozen,
        num_microbatches=rng.choice([1, 2, 4, 6]),
        checkpoint=rng.choice(["never", "never", "except_last", "always"]),
        copies=rng.choice(["overlapped", "serial"]),
        prefix_placements=rng.choice([PLACEMENTS, PLACEMENTS[:2], PLACEMENTS[::2]]),
    )
    return profile(layers, tied_layers=tied), machines, options


def brute_force(model, machines, options):
    """Shortest simulated step over all K, cuts and schedules; None: nothing fits."""
    frozen, n = options["boundary"], len(model.layers)
    best = None
    for num_stages in range(1, min(4, n - frozen) + 1):
        for cuts in all_cuts(n - frozen, num_stages):
            for schedule in SCHEDULES:
                try:
                    plan = search(
                        model,
                        machines,
                        cuts=[frozen + cut for cut in cuts],
                        schedules=(schedule,),
                        **options,
                    )
                except ValueError:  # memory, or a parameter across the cut
                    continue
                assert plan.lower_bound_ns <= plan.simulated_step_ns
                step = plan.simulated_step_ns
                best = step if best is None else min(best, step)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_no_cuts_schedule_or_length_simulate_faster_than_the_plan(seed):
    rng = random.Random(seed)
    for _ in range(12 if seed else 4):
        model, machines, options = instance(rng, 13 if seed == 0 else 7)
        best = brute_force(model, machines, options)
        try:
            plan = search(model, machines, schedules=SCHEDULES, **options)
        except InfeasiblePlan:
            assert best is None
            continue
        assert plan.simulated_step_ns == best
        assert "nothing else that was allowed simulates faster" in " ".join(
            plan.reasons
        )


@pytest.mark.parametrize("copies", ["overlapped", "serial"])
def test_gpipe_estimate_is_the_simulated_time(copies):
    rng = random.Random(3)
    for _ in range(200):
        n = rng.randint(2, 12)
        columns = [random_costs(rng, n) for _ in range(3)]
        bytes_ = [rng.choice([0, 3, 20]) for _ in range(n)]
        layers = [
            layer(
                i,
                times=times,
                boundary_bytes_per_sample=bytes_[i],
                trainable=i >= rng.choice([0, 1]),
            )
            for i, times in enumerate(zip(*columns, strict=True))
        ]
        plan = search(
            profile(layers),
            cluster(4, device_link_bytes_per_s=10**9),
            global_batch=32,
            max_replicas=1,
            num_stages=rng.randint(1, min(4, n)),
            copies=copies,
        )
        assert plan.simulated_step_ns == plan.predicted_step_ns
        assert plan.lower_bound_ns == plan.predicted_step_ns
