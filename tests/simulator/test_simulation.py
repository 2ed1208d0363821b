"""A plan played as a step: numbers, text grid, trace file."""

import json
import random
import stat

import pytest

from pipetransformer.planner import CacheTiers, Plan, search
from pipetransformer.simulator import simulate
from tests.planner.instances import cluster, equal_profile, layer, profile

RATES = dict(device_link_bytes_per_s=10**9, network_bytes_per_s=10**9)


def small_plan(**fields):
    values = dict(
        boundary=0,
        num_stages=2,
        num_replicas=1,
        num_microbatches=2,
        samples_per_microbatch=1,
        global_batch=2,
        cuts=(0, 1, 2),
    )
    return Plan(**{**values, **fields})


def random_profile(rng):
    layers = []
    for i in range(rng.randint(3, 12)):
        activation = rng.randint(0, 900)
        made = layer(
            i,
            times=tuple(rng.randint(1, 500) for _ in range(3)),
            parameters=rng.randint(0, 4000),
            activation=activation,
            weight_grad_activation_bytes_per_sample=rng.randint(0, activation),
            boundary_bytes_per_sample=rng.randint(0, 200),
            activation_bytes_per_microbatch=rng.choice([0, 70]),
            shared_activation_bytes=rng.choice([0, 4000]),
        )
        layers.append(made)
    return profile(layers)


def test_simulation_of_a_plan_has_the_ideal_numbers():
    four = search(
        equal_profile(4, times=(100, 100, 100)),
        cluster(4),
        global_batch=8,
        num_stages=4,
        num_microbatches=8,
    )
    result = simulate(four, equal_profile(4, times=(100, 100, 100)), cluster(4))
    # The first layer drops a third of its forward from its input gradient.
    assert result.step_ns == 3 * 100 * (8 + 3) - 33
    assert result.stage_busy_ns == (8 * 267, 2400, 2400, 2400)
    assert result.to_dict()["simulated"] is True
    assert result.to_dict()["step_ns"] == result.step_ns


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_simulation_agrees_with_the_plan_that_was_chosen_by_it(schedule):
    rng = random.Random(7)
    machines = cluster(4, num_nodes=2, cache=CacheTiers(host_bytes=10**9), **RATES)
    for _ in range(40):
        layers = random_profile(rng)
        plan = search(
            layers,
            machines,
            global_batch=rng.randint(8, 64),
            boundary=rng.randint(0, len(layers.layers) - 2),
            schedules=(schedule,),
            checkpoint=rng.choice(["never", "except_last", "always"]),
        )
        result = simulate(plan, layers, machines, steps=3)
        assert result.step_ns == plan.simulated_step_ns
        assert result.bubble_fraction == plan.bubble_fraction
        assert result.total_ns == 3 * plan.simulated_step_ns
        assert plan.lower_bound_ns <= result.step_ns
        peaks = zip(result.peak_bytes_per_stage, plan.bytes_per_stage, strict=True)
        assert all(peak <= planned for peak, planned in peaks)


def test_thousands_of_devices_are_simulated_as_one_replica():
    layers = equal_profile(8, times=(1000, 1000, 1000), parameters=1000)
    for num_nodes in (1, 1250):
        machines = cluster(8, num_nodes=num_nodes, **RATES)
        plan = search(layers, machines, global_batch=16 * num_nodes, num_stages=8)
        result = simulate(plan, layers, machines)
        assert plan.num_replicas == num_nodes
        assert len(result.stage_busy_ns) == 8
        assert (result.exposed_all_reduce_ns > 0) == (num_nodes > 1)


def test_grid_shows_each_operation_where_it_runs():
    layers = equal_profile(2, times=(100, 50, 50))
    text = simulate(small_plan(), layers, cluster(2)).grid(width=60)
    heading, *lines = text.splitlines()
    assert heading == (
        "simulated: K=2 R=1 M=2 layers 0|1 gpipe, 567 ns a step, a column is 9.45 ns"
    )
    assert lines == [
        "stage 0      F0--------F1---------.....................B1-----...B0------",
        "stage 1      ..........F0---------F1--------B1---------B0--------........",
        "F forward, B backward, . standing still",
    ]


def test_grid_needs_room():
    result = simulate(small_plan(), equal_profile(2), cluster(2))
    with pytest.raises(ValueError, match="width: expected at least 10 columns, got 9"):
        result.grid(width=9)


def test_trace_is_chromes_format_and_private(tmp_path):
    layers = equal_profile(
        4, times=(100, 50, 50), parameters=1000, boundary_bytes_per_sample=10
    )
    machines = cluster(4, num_nodes=2, cache=CacheTiers(), **RATES)
    plan = search(
        layers,
        machines,
        global_batch=8,
        boundary=1,
        num_stages=2,
        num_microbatches=2,
        replicas="all",
    )
    result = simulate(plan, layers, machines)
    path = tmp_path / "step.json"
    path.write_text("old")
    result.write_trace(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    trace = json.loads(path.read_text())
    assert trace["otherData"]["simulated"] is True
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(result.timeline)
    assert max(e["ts"] + e["dur"] for e in slices) * 1000 == result.step_ns
    names = {
        e["tid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert {names[e["tid"]] for e in slices if e["name"] == "P0"} == {"stage 0"}
    assert names[next(e["tid"] for e in slices if e["name"] == "A")].startswith("stage")
    assert "network" in names.values()
    assert "stage 1, activations in" in names.values()
    assert "stage 0, gradients in" in names.values()


def test_trace_that_cannot_be_written_leaves_nothing(tmp_path):
    result = simulate(small_plan(), equal_profile(2), cluster(2))
    folder = tmp_path / "step.json"
    folder.mkdir()
    with pytest.raises(OSError):
        result.write_trace(folder)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (small_plan(num_stages=3, cuts=(0, 1, 2, 3)), "plan num_stages: .*at most 2"),
        (small_plan(num_replicas=2), "plan num_replicas: expected at most 1 of 2 dev"),
        (small_plan(num_microbatches=3), "at most 2 .the global batch., got 3"),
        (
            small_plan(boundary=1, cuts=(1, 2, 3)),
            "plan prefix: expected 'replicated', 'pipelined' or 'filled' for 1 frozen",
        ),
        (small_plan(cuts=(0, 1, 9)), "cut"),
    ],
)
def test_plan_that_does_not_fit_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        simulate(plan, equal_profile(3), cluster(2))


def test_prefix_is_cheapest_in_the_gaps_and_dearest_on_one_device():
    layers = equal_profile(12, times=(1000, 1000, 1000))
    machines = cluster(4)
    plan = search(
        layers, machines, global_batch=16, boundary=4, num_stages=4, num_microbatches=8
    )
    times = {
        mode: simulate(plan, layers, machines, prefix=mode).step_ns
        for mode in ("filled", "barrier", "serial")
    }
    frozen = 4 * 2 * 1000  # of a micro-batch of two rows
    assert times["serial"] - times["barrier"] == (8 - 2) * frozen
    assert times["filled"] < times["barrier"]
    with pytest.raises(ValueError, match="prefix: expected"):
        simulate(plan, layers, machines, prefix="later")


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_number_of_steps_is_checked(steps):
    with pytest.raises(ValueError, match="steps: expected (an integer|1 to)"):
        simulate(small_plan(), equal_profile(2), cluster(2), steps=steps)
