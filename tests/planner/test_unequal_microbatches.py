"""Micro-batches that differ by a row are timed by their mean."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.planner import search
from tests.planner.instances import cluster, layer, profile

POINTS = (1, 100)


def model_of(costs):
    """One layer per stage; each cost is (fixed, per row) of F, I and W, even."""
    return profile(
        [
            layer(i, times=[tuple(a + b * n for n in POINTS) for a, b in stage])
            for i, stage in enumerate(costs)
        ],
        microbatch_samples=POINTS,
    )


def exact_gpipe_ns(costs, sizes):
    """Step in which every micro-batch takes the time of its own rows."""

    def time_of(stage, parts, rows):
        return sum(
            costs[stage][part][0] + costs[stage][part][1] * rows for part in parts
        )

    def first_drop(stage, rows):
        return time_of(stage, [0], rows) / 3 if stage == 0 else 0

    ends = [0.0] * len(costs)
    for rows in sizes:
        arrived = 0.0
        for stage in range(len(costs)):
            arrived = ends[stage] = max(ends[stage], arrived) + time_of(
                stage, [0], rows
            )
    start = ends[-1]
    ends = [start] * len(costs)
    for rows in reversed(sizes):
        arrived = start
        for stage in reversed(range(len(costs))):
            taken = time_of(stage, [1, 2], rows) - first_drop(stage, rows)
            arrived = ends[stage] = max(ends[stage], arrived) + taken
    return max(ends)


def sizes_of(rows, count):
    return [rows // count + (i < rows % count) for i in range(count)]


cost = st.tuples(st.integers(0, 3000), st.integers(1000, 9000))
# The input gradient takes at least what the first layer drops.
stage_costs = st.tuples(cost, cost, cost).map(
    lambda stage: (
        stage[0],
        (stage[0][0] + stage[1][0], stage[0][1] + stage[1][1]),
        stage[2],
    )
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    costs=st.lists(stage_costs, min_size=1, max_size=4),
    count=st.integers(1, 12),
    more=st.integers(0, 30),
)
def test_unequal_microbatches_are_off_by_a_row_on_the_ramps_at_most(costs, count, more):
    rows = count + more
    length = len(costs)
    plan = search(
        model_of(costs),
        cluster(length),
        global_batch=rows,
        num_microbatches=count,
        cuts=range(length + 1),
        max_replicas=1,
    )
    exact = exact_gpipe_ns(costs, sizes_of(rows, count))
    one_row = sum(slope for stage in costs for _, slope in stage)
    rounding = 10 * length * count
    assert abs(plan.simulated_step_ns - exact) <= one_row + rounding
    if rows % count == 0:
        assert abs(plan.simulated_step_ns - exact) <= rounding


@pytest.mark.parametrize(("rows", "count"), [(32, 10), (33, 16), (7, 4)])
def test_one_stage_takes_as_long_as_its_rows(rows, count):
    model = model_of([((0, 3000), (0, 6000), (0, 6000))])
    plan = search(model, cluster(1), global_batch=rows, num_microbatches=count)
    assert plan.simulated_step_ns == pytest.approx(14_000 * rows, abs=10 * count)
    assert plan.samples_per_microbatch == -(-rows // count)
