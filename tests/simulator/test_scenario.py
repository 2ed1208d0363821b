"""Runs: segments, pauses, failures, stragglers."""

import pytest

from pipetransformer.planner import search
from pipetransformer.simulator import simulate
from pipetransformer.testing.scenario import Segment, Straggler, Stretch, simulate_run
from tests.planner.instances import cluster, equal_profile

LAYERS = equal_profile(8, times=(1000, 1000, 1000), parameters=1000)
MACHINES = cluster(4, num_nodes=2, network_bytes_per_s=10**9)


def plan(machines=MACHINES, **fields):
    values = dict(global_batch=32, num_stages=2, num_microbatches=4)
    return search(LAYERS, machines, **{**values, **fields})


def step_ns(a_plan, machines=MACHINES):
    return simulate(a_plan, LAYERS, machines).step_ns


def test_run_is_the_sum_of_its_steps_and_pauses():
    first, second = plan(), plan(boundary=4)
    run = simulate_run(
        [
            Segment(plan=first, steps=10),
            Segment(plan=second, steps=30, event="boundary", pause_ns=777),
        ],
        LAYERS,
        MACHINES,
    )
    assert run.total_ns == 10 * step_ns(first) + 777 + 30 * step_ns(second)
    assert run.step_times_ns == (step_ns(first),) * 10 + (step_ns(second),) * 30
    assert [s.first_step for s in run.segments] == [0, 10]
    assert sum(s.total_ns for s in run.segments) == run.total_ns
    assert run.to_dict()["simulated"] is True
    assert run.to_dict()["segments"][1]["stretches"] == [
        {"steps": 30, "step_ns": step_ns(second)}
    ]


def test_failure_repeats_lost_steps_on_the_machines_that_are_left():
    whole, left = plan(), cluster(4, num_nodes=1)
    after = plan(left)
    run = simulate_run(
        [
            Segment(plan=whole, steps=50),
            Segment(
                plan=after,
                steps=50,
                event="failure",
                pause_ns=10**6,
                redone_steps=20,
                cluster=left,
            ),
        ],
        LAYERS,
        MACHINES,
    )
    assert after.num_replicas < whole.num_replicas
    expected = 50 * step_ns(whole) + 10**6 + 70 * step_ns(after, left)
    assert run.total_ns == expected
    assert len(run.step_times_ns) == 120


def test_straggler_slows_all_replicas_while_it_lasts():
    first = plan()
    slow = Straggler(device=3, slowdown=2.0, first_step=5, end_step=8)
    run = simulate_run(
        [Segment(plan=first, steps=10)], LAYERS, MACHINES, stragglers=[slow]
    )
    (segment,) = run.segments
    normal = step_ns(first)
    assert [s.steps for s in segment.stretches] == [5, 3, 2]
    assert segment.stretches[0] == Stretch(steps=5, step_ns=normal)
    assert segment.stretches[2] == Stretch(steps=2, step_ns=normal)
    # One of two stages at half speed: between the normal time and twice that.
    assert normal < segment.stretches[1].step_ns < 2 * normal


def test_stragglers_on_every_device_of_a_replica_scale_its_compute():
    first = plan(cluster(4, num_nodes=2))  # free all-reduces
    slow = [Straggler(device=d, slowdown=1.5, first_step=0, end_step=4) for d in (6, 7)]
    run = simulate_run(
        [Segment(plan=first, steps=4)],
        LAYERS,
        cluster(4, num_nodes=2),
        stragglers=slow,
    )
    (segment,) = run.segments
    (stretch,) = segment.stretches
    expected = step_ns(first, cluster(4, num_nodes=2)) * 3 / 2
    assert stretch == Stretch(steps=4, step_ns=pytest.approx(expected, rel=1e-3))


def test_straggler_on_an_idle_device_changes_nothing():
    machines = cluster(3)
    first = plan(machines)  # K = 2 leaves the third device idle
    slow = Straggler(device=2, slowdown=9.0, first_step=0, end_step=4)
    run = simulate_run([Segment(plan=first, steps=4)], LAYERS, machines)
    slowed = simulate_run(
        [Segment(plan=first, steps=4)], LAYERS, machines, stragglers=[slow]
    )
    assert slowed == run


def test_straggler_follows_its_device_into_the_next_plan():
    machines = cluster(4)
    wide, narrow = plan(machines, num_stages=4), plan(machines, num_stages=1)
    slow = Straggler(device=3, slowdown=3.0, first_step=0, end_step=100)
    run = simulate_run(
        [Segment(plan=wide, steps=3), Segment(plan=narrow, steps=3)],
        LAYERS,
        machines,
        stragglers=[slow],
    )
    for segment, one in zip(run.segments, (wide, narrow), strict=True):
        assert segment.stretches[0].step_ns > step_ns(one, machines)
    # Alone in its replica everything takes three times as long.
    assert run.segments[1].stretches[0].step_ns == 3 * step_ns(narrow, machines)


def test_long_runs_on_many_devices_cost_no_more():
    machines = cluster(8, num_nodes=1250, network_bytes_per_s=10**10)
    large = plan(machines, global_batch=8 * 5000)
    assert large.num_replicas == 5000
    slow = Straggler(device=9_999, slowdown=1.2, first_step=10, end_step=900_000)
    run = simulate_run(
        [Segment(plan=large, steps=1_000_000)], LAYERS, machines, stragglers=[slow]
    )
    assert [s.steps for s in run.segments[0].stretches] == [10, 899_990, 100_000]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: simulate_run([], LAYERS, MACHINES), "segments: expected at least one"),
        (lambda: Segment(plan=plan(), steps=0), "segment steps: expected 1 to"),
        (lambda: Segment(plan=plan(), steps=1, pause_ns=-1), "segment pause_ns"),
        (lambda: Segment(plan=plan(), steps=1, event="x"), "segment event: expected"),
        (
            lambda: Straggler(device=0, slowdown=0.0, first_step=0, end_step=1),
            "straggler slowdown: expected 0.001 to 100, got 0.0",
        ),
        (
            lambda: Straggler(device=0, slowdown=2.0, first_step=3, end_step=3),
            r"straggler end_step: expected 4 to 2\*\*62, got 3",
        ),
        (
            lambda: Straggler(device=-1, slowdown=2.0, first_step=3, end_step=4),
            "straggler device",
        ),
    ],
)
def test_malformed_scenario_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
