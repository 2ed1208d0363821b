"""Devices that share cores: time is stretched, and nothing else changes."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest

from tests.simulator.costs import random_stages, simulate, stage, step, step_ns
from tests.simulator.test_step import random_step

COMPUTE = "FRBIWPO"


def shared(costs, cores_permille, replicas=1):
    costs.cores_permille, costs.replicas_per_node = cores_permille, replicas
    return costs


def stretched_end(timeline, cores, replicas):
    """The end of the last event when cores are shared, by its own arithmetic."""
    moments = sorted({t for e in timeline for t in (e.begin_ns, e.end_ns)} | {0})
    total = Fraction(0)
    for begin, end in pairwise(moments):
        working = sum(
            e.kind in COMPUTE and e.begin_ns <= begin and end <= e.end_ns
            for e in timeline
        )
        total += (end - begin) * max(Fraction(1), working * replicas / cores)
    return total, len(moments)


@pytest.mark.parametrize("seed", range(40))
def test_time_is_stretched_where_more_devices_work_than_there_are_cores(seed):
    rng = random.Random(seed)
    costs = random_step(rng)
    costs.cache_wait_ns = 0
    costs.process_ns = rng.randint(0, 500)
    alone = simulate(costs, keep_timeline=True)
    replicas = rng.randint(1, 4)
    permille = rng.choice([1000, 1500, 2000, 3000])
    found = step_ns(shared(costs, permille, replicas))
    cores = Fraction(permille, 1000)
    if replicas * len(costs.stages) <= cores:
        assert found == alone.step_ns
        return
    exact, moments = stretched_end(alone.timeline, cores, replicas)
    # Factors are thousandths, and each piece is rounded up.
    assert exact * Fraction(999, 1000) <= found <= exact + moments


def test_saturated_cores_take_all_work_divided_by_their_number():
    costs = step("gpipe", [(10_000, 10_000, 10_000)] * 4, 16)
    assert step_ns(shared(costs, 1000)) == 4 * 16 * 30_000
    one_stage = step("gpipe", [(10_000, 10_000, 10_000)], 2)
    assert step_ns(shared(one_stage, 2000, 4)) == 2 * 2 * 30_000
    assert step_ns(shared(one_stage, 2000, 2)) == 2 * 30_000


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_order_and_work_stay_and_busy_time_is_wall_time(schedule):
    stages, _ = random_stages(random.Random(5))
    costs = step(schedule, stages, 6)
    alone = simulate(costs, keep_timeline=True)
    together = simulate(shared(costs, 1000), keep_timeline=True)

    def order(result):
        return [(e.kind, e.stage, e.microbatch) for e in result.timeline]

    def by_name(result):
        return sorted(order(result))

    assert by_name(together) == by_name(alone)
    begins = [e.begin_ns for e in together.timeline]
    assert begins == sorted(begins)
    (pipeline,) = together.pipelines
    assert max(pipeline.stage_busy_ns) <= together.step_ns


def test_reads_in_line_take_a_core_and_reads_alongside_do_not():
    in_line = step("gpipe", [(1000, 0, 1000)], 1, cache_wait_ns=500)
    assert step_ns(shared(in_line, 1000, 4)) == 4 * 2500
    alongside = step("gpipe", [(1000, 0, 1000)], 1, cache_read_ns=500)
    assert step_ns(shared(alongside, 1000, 4)) == 4 * 2000


def test_what_a_process_does_follows_the_all_reduce():
    stages = [stage(10, 0, 10, all_reduce_ns=7), stage(10, 10, 10)]
    costs = step("gpipe", stages, 2)
    before = step_ns(costs)
    costs.process_ns = 100
    assert step_ns(costs) == before + 100
    assert step_ns(shared(costs, 1000, 3)) >= before + 300


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cores_permille": 999}, "cores_permille: expected 0 or 1000 to"),
        ({"cores_permille": -1}, "cores_permille: expected 0 or 1000 to"),
        ({"replicas_per_node": 0}, "replicas_per_node: expected 1 to"),
        ({"process_ns": -1}, "process_ns: expected 0 to"),
    ],
)
def test_what_cannot_be_is_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        simulate(step("gpipe", [(1, 1, 1)], 1, **fields))
