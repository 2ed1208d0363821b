"""Batches that share an optimizer step: one of them reduces, all pay for the step."""

import dataclasses
import random

import pytest

from pipetransformer.planner import Plan, replan, search, step_costs
from pipetransformer.simulator import simulate
from tests.planner.instances import all_cuts, cluster, equal_profile, layer, profile

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def random_model(rng, **fields):
    return profile(
        [
            layer(
                i,
                times=tuple(rng.randint(1, 5000) for _ in range(3)),
                parameters=rng.randint(0, 20_000),
                **fields,
            )
            for i in range(rng.randint(2, 6))
        ]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_the_mean_of_those_that_share_a_step(seed):
    rng = random.Random(seed)
    model = random_model(rng, optimizer_ns=rng.randint(0, 300))
    rate = rng.choice([10**7, 10**9])
    machines = cluster(
        4, replica_link_bytes_per_s=rate, replica_link_latency_ns=50, step_ns=100
    )
    batches = rng.randint(2, 9)
    alone = dict(
        global_batch=16,
        num_stages=rng.randint(1, 2),
        schedules=(rng.choice(SCHEDULES),),
        checkpoint=rng.choice(["never", "always"]),
    )
    plan = search(model, machines, accumulation_steps=batches, **alone)
    same = dict(alone, cuts=plan.cuts, num_microbatches=plan.num_microbatches)
    same.update(max_replicas=plan.num_replicas, replicas="all")
    last = search(model, machines, **same)
    free = [dataclasses.replace(each, optimizer_ns=0) for each in model.layers]
    before = search(
        dataclasses.replace(model, layers=tuple(free)),
        dataclasses.replace(machines, replica_link_bytes_per_s=None),
        **same,
    )
    assert last.shape == before.shape == plan.shape
    whole = last.simulated_step_ns + (batches - 1) * before.simulated_step_ns
    # Shares of a batch are whole nanoseconds.
    assert abs(plan.simulated_step_ns - whole / batches) <= 2
    assert plan.lower_bound_ns <= plan.simulated_step_ns
    told = simulate(plan, model, machines)
    assert told.step_ns == plan.simulated_step_ns
    reducing = {event.kind for event in told.timeline}
    assert ("A" in reducing) == (plan.num_replicas > 1)


def test_replicas_pay_once_their_all_reduce_is_shared():
    model = equal_profile(4, times=(10**6,) * 3, parameters=10**8)
    machines = cluster(4, replica_link_bytes_per_s=10**9)
    asked = dict(global_batch=32, num_stages=1)
    assert search(model, machines, **asked).num_replicas == 1
    assert search(model, machines, accumulation_steps=16, **asked).num_replicas == 4


@pytest.mark.parametrize("seed", range(6))
def test_cuts_are_the_best_by_the_estimate(seed):
    """Slots that share cores: there nothing but the solver chooses among cuts."""
    rng = random.Random(seed)
    layers = [
        layer(
            i,
            times=tuple(rng.randint(1, 5000) for _ in range(3)),
            parameters=rng.choice([0, 100, 3000, 40_000]),
            boundary_bytes_per_sample=rng.choice([0, 30]),
        )
        for i in range(8)
    ]
    model = profile(layers)
    machines = cluster(
        6,
        device_link_bytes_per_s=10**9,
        replica_link_bytes_per_s=10**9,
        cores_permille=6000,
    )
    asked = dict(global_batch=32, schedules=("gpipe",), max_replicas=2, replicas="all")
    asked.update(num_microbatches=6, accumulation_steps=rng.randint(2, 5))
    best = search(model, machines, num_stages=3, **asked)
    assert best.num_replicas == 2
    others = [
        search(model, machines, cuts=cuts, **asked).predicted_step_ns
        for cuts in all_cuts(8, 3)
    ]
    assert best.predicted_step_ns == min(others)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_step_that_is_drawn_is_the_one_that_reduces(schedule):
    model = equal_profile(4, times=(1000, 1000, 1000), parameters=10_000)
    machines = cluster(4, replica_link_bytes_per_s=10**9)
    asked = dict(global_batch=16, num_stages=2, replicas="all", schedules=(schedule,))
    plan = search(model, machines, accumulation_steps=5, **asked)
    told = simulate(plan, model, machines)
    alone = simulate(search(model, machines, **asked), model, machines)
    assert told.step_ns < told.last_step_ns == alone.step_ns == alone.last_step_ns
    assert max(event.end_ns for event in told.timeline) <= told.last_step_ns
    heading, *lines = told.grid(60).splitlines()
    assert f"{told.last_step_ns:,} ns a step" in heading
    drawn = [line for line in lines if line.startswith("stage")]
    assert {len(line) for line in drawn} == {len("stage 0      ") + 60}


def test_gradients_of_batches_before_stay_beside_the_sums():
    """A pipeline adds up over micro-batches, then into what is there already."""
    model = equal_profile(4, times=(10, 10, 10), parameters=1000, activation=10)
    machines = cluster(2)
    asked = dict(global_batch=8, num_stages=2, num_microbatches=4)
    plain = search(model, machines, **asked)
    shared = search(model, machines, accumulation_steps=2, **asked)
    for stage in range(2):
        more = shared.bytes_per_stage[stage] - plain.bytes_per_stage[stage]
        # All of them, less the micro-batch that is gone when the first sum is there.
        assert 0 < more <= 2 * 1000
        costs = [step_costs(p, model, machines).stages[stage] for p in (plain, shared)]
        assert [c.summed_gradient_bytes for c in costs] == [0, 2000]


def test_a_plan_tells_how_many_batches_it_was_made_for():
    model, machines = equal_profile(4), cluster(2)
    plan = search(model, machines, global_batch=8, accumulation_steps=3)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.accumulation_steps == 3
    plain = search(model, machines, global_batch=8)
    assert "accumulation_steps" not in plain.to_json(), "as before it was there"
    assert Plan.from_json(plain.to_json()).accumulation_steps == 1
    after = replan(
        model,
        machines,
        current=plan,
        boundary=1,
        global_batch=8,
        accumulation_steps=3,
        remaining_steps=10,
    )
    assert after.accumulation_steps == 3


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_numbers_of_batches_that_cannot_be_are_refused(value):
    with pytest.raises((TypeError, ValueError), match="accumulation_steps"):
        search(equal_profile(2), cluster(2), global_batch=8, accumulation_steps=value)
    plan = search(equal_profile(2), cluster(2), global_batch=8)
    with pytest.raises(ValueError, match="plan accumulation_steps"):
        dataclasses.replace(plan, accumulation_steps=value, plan_hash=-1)
