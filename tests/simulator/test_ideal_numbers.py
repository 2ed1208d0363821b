"""Equal stages with f = b = w = 1 and no communication: exact numbers."""

import pytest

from tests.simulator.costs import simulate, step, step_ns

UNIT = 1000


def equal(schedule, num_stages, num_microbatches, unit=UNIT, **fields):
    return step(schedule, [(unit, unit, unit)] * num_stages, num_microbatches, **fields)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "whole", "split"),
    [(4, 8, 33, 27), (8, 16, 69, 55), (8, 8, 45, 31)],
)
def test_equal_stages_take_the_ideal_times(num_stages, num_microbatches, whole, split):
    for schedule, expected in (("gpipe", whole), ("1f1b", whole), ("zb-h1", split)):
        costs = equal(schedule, num_stages, num_microbatches, unit=1)
        assert step_ns(costs) == expected


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "percent"),
    [(8, 16, 30.4), (8, 32, 17.9), (4, 16, 15.8), (2, 16, 5.9)],
)
def test_bubble_is_the_share_of_filling_and_draining(
    num_stages, num_microbatches, percent
):
    for schedule in ("gpipe", "1f1b"):
        result = simulate(equal(schedule, num_stages, num_microbatches))
        (pipeline,) = result.pipelines
        exact = (num_stages - 1) / (num_microbatches + num_stages - 1)
        assert pipeline.bubble_fraction == pytest.approx(exact, abs=1e-12)
        assert 100 * exact == pytest.approx(percent, abs=0.051)
