"""Slots of a host: shared cores, all-reduce through the host, work of processes."""

import dataclasses
import random

import pytest

from pipetransformer.planner import Cluster, InfeasiblePlan, search, step_costs
from pipetransformer.simulator import simulate
from tests.planner.instances import all_cuts, cluster, equal_profile, layer, profile

HOST = dict(
    cores_permille=2000,
    replica_link_bytes_per_s=10**9,
    replica_link_latency_ns=1000,
    step_ns=500,
)


def test_an_unshared_host_is_the_cluster_it_was():
    plain = cluster(4)
    assert plain.to_json() == dataclasses.replace(plain, cores_permille=0).to_json()
    assert "cores" not in plain.to_json()
    host = cluster(4, **HOST, row_ns=3)
    assert Cluster.from_json(host.to_json()) == host


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cores_permille", 999),
        ("cores_permille", True),
        ("replica_link_bytes_per_s", 0),
        ("replica_link_latency_ns", -1),
        ("step_ns", -1),
        ("row_ns", 1.5),
    ],
)
def test_malformed_fields_are_named(field, value):
    with pytest.raises(ValueError, match=f"cluster {field}"):
        cluster(4, **{field: value})


def test_a_ring_waits_in_each_round_and_shares_the_cores():
    one = profile([layer(0, times=(10, 10, 10), parameters=4_000_000)])

    def all_reduce_ns(replicas, **fields):
        host = cluster(replicas, **{**HOST, **fields})
        options = dict(global_batch=replicas, num_stages=1, replicas="all")
        plan = search(one, host, **options)
        return step_costs(plan, one, host).stages[0].all_reduce_ns

    # 2 (R - 1) rounds; 2 (R - 1) / R of 4 MB at 1 GB/s by each process, of which two
    # run at the same time.
    assert all_reduce_ns(2) == 2 * 1000 + 4_000_000
    assert all_reduce_ns(4) == 6 * 1000 + 2 * 6_000_000
    assert all_reduce_ns(4, cores_permille=0) == 6 * 1000 + 6_000_000


def test_optimizer_and_process_follow_every_step():
    layers = [layer(i, times=(1000, 1000, 1000), optimizer_ns=70) for i in range(4)]
    found = profile(layers)
    host = cluster(1, step_ns=500, row_ns=3)
    plain = search(found, cluster(1), global_batch=8, num_microbatches=1)
    plan = search(found, host, global_batch=8, num_microbatches=1)
    more = 500 + 8 * 3
    assert plan.simulated_step_ns == plain.simulated_step_ns + more
    frozen = search(found, host, global_batch=8, boundary=3, cache_tiers=("host",))
    assert step_costs(frozen, found, host).process_ns == more + 70, "one layer steps"


def test_replicas_that_only_share_cores_are_no_gain():
    """Four replicas on two cores pay four times for what each process does."""
    layers = [
        layer(i, times=(100_000, 100_000, 100_000), parameters=1000) for i in range(4)
    ]
    found = profile(layers)
    own = search(found, cluster(4), global_batch=16)
    assert own.shape[:2] == (1, 4), "with cores of their own replicas have no bubbles"
    busy = {**HOST, "step_ns": 2_000_000}
    host = cluster(4, **busy)
    shared = search(found, host, global_batch=16)
    four = search(found, host, global_batch=16, num_stages=1)
    assert shared.shape[1] < 4
    assert shared.simulated_step_ns < four.simulated_step_ns


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_much_better_than_the_one_that_is_found(seed):
    """Cuts are those for devices of their own; that costs the ends of a step."""
    rng = random.Random(seed)
    layers = [
        layer(
            i,
            times=tuple(rng.randint(1, 5000) for _ in range(3)),
            parameters=rng.randint(0, 5000),
            optimizer_ns=rng.randint(0, 300),
        )
        for i in range(rng.randint(2, 6))
    ]
    found = profile(layers)
    host = cluster(
        4,
        cores_permille=rng.choice([1000, 1700, 2000, 3000]),
        replica_link_bytes_per_s=10**9,
        replica_link_latency_ns=rng.randint(0, 5000),
        step_ns=rng.randint(0, 5000),
        row_ns=rng.randint(0, 100),
    )
    asked = dict(
        global_batch=16,
        schedules=("gpipe", "1f1b", "zb-h1"),
        boundary=seed % 2 and len(layers) // 3,
        prefix_placements=("replicated", "filled"),
        accumulation_steps=1 + seed % 3,
    )
    best = search(found, host, **asked)
    assert simulate(best, found, host).step_ns == best.simulated_step_ns
    for candidate in best.candidates:
        assert candidate.lower_bound_ns <= candidate.simulated_step_ns
    frozen = asked["boundary"]
    for stages in range(1, min(4, len(layers) - frozen) + 1):
        for cuts in all_cuts(len(layers) - frozen, stages):
            for microbatches in {stages, 2 * stages, 4 * stages}:
                for schedule in asked["schedules"]:
                    try:
                        other = search(
                            found,
                            host,
                            cuts=[frozen + cut for cut in cuts],
                            num_microbatches=microbatches,
                            **{**asked, "schedules": (schedule,)},
                        )
                    except InfeasiblePlan:
                        continue
                    assert best.simulated_step_ns <= 1.1 * other.simulated_step_ns


def test_equal_work_takes_as_long_in_any_shape_on_one_core():
    found = equal_profile(8, times=(900_000, 900_000, 900_000))
    host = cluster(4, cores_permille=1000)
    times = {
        search(found, host, global_batch=16, num_stages=k).simulated_step_ns
        for k in (1, 2, 4)
    }
    assert max(times) - min(times) <= 100
