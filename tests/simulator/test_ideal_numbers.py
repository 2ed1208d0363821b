"""Equal stages with f = b = w = 1 and no communication: exact numbers."""

import random

import pytest

from tests.simulator.costs import (
    columns,
    random_stages,
    simulate,
    stage,
    step,
    step_ns,
)

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


@pytest.mark.parametrize(
    ("num_stages", "frozen_share", "num_microbatches", "percent"),
    [(4, 1, 4, 76), (4, 1, 8, 97), (4, 1, 16, 112), (8, 2, 32, 438)],
)
def test_serial_prefix_costs_what_the_formula_says(
    num_stages, frozen_share, num_microbatches, percent
):
    """Frozen layers over active layers = frozen_share, one device runs them."""
    frozen = ("replicated", [frozen_share * num_stages * UNIT])
    with_prefix = equal("gpipe", num_stages, num_microbatches, prefix=frozen)
    base = step_ns(equal("gpipe", num_stages, num_microbatches))
    added = step_ns(with_prefix, prefix_mode="serial") - base
    assert added == num_microbatches * frozen_share * num_stages * UNIT
    assert round(100 * added / base) == percent


# Added time of a step in percent: frozen over active layers, M/K -> K = 4 to 8.
FILLED = {
    (0.5, 1): (0, 0),
    (0.5, 2): (2, 2),
    (0.5, 4): (6, 6),
    (1, 1): (1, 2),
    (1, 2): (4, 5),
    (1, 4): (9, 12),
    (2, 1): (3, 3),
    (2, 2): (16, 21),
    (2, 4): (37, 40),
}


def filled_percent(schedule, num_stages, frozen_share, rounds, spread=0, seed=0):
    """Added by the next step's prefix in the gaps; stages differ by `spread`."""
    rng = random.Random(seed)
    unit = 10_000
    stages = [
        tuple(round(unit * rng.uniform(1 - spread, 1 + spread)) for _ in range(3))
        for _ in range(num_stages)
    ]
    frozen = ("replicated", [round(frozen_share * num_stages * unit)])
    num_microbatches = rounds * num_stages
    base = step_ns(step(schedule, stages, num_microbatches))
    filled = step_ns(
        step(schedule, stages, num_microbatches, prefix=frozen), prefix_mode="filled"
    )
    return 100 * (filled - base) / base


@pytest.mark.parametrize(("frozen_share", "rounds"), FILLED)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_filled_gaps_leave_only_what_does_not_fit(schedule, frozen_share, rounds):
    """Equal stages: grains fit the gaps exactly, so the rest is the formula's, free up
    to M * frozen = 3 (K-1) * active."""
    for num_stages in (4, 8):
        work = rounds * num_stages * frozen_share * num_stages
        left = max(0, work - 3 * (num_stages - 1) * num_stages) / num_stages
        base = 3 * (rounds * num_stages + num_stages - 1)
        percent = filled_percent(schedule, num_stages, frozen_share, rounds)
        assert percent == pytest.approx(100 * left / base, abs=0.01)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_prefix_placed_in_gaps_is_one_that_the_options_put_there(schedule):
    stages = [(10, 11, 9)] * 4
    placed = step(schedule, stages, 8, prefix=("filled", [30]))
    asked = step(schedule, stages, 8, prefix=("replicated", [30]))
    assert step_ns(placed) == step_ns(asked, prefix_mode="filled")
    assert step_ns(placed) < step_ns(asked)
    serial = step_ns(asked, prefix_mode="serial")
    assert step_ns(placed, prefix_mode="serial") == serial
    # In parts that are not interrupted: of the whole, the gaps hold less.
    whole = step(schedule, stages, 8, prefix=("filled", [30]), prefix_grain_ns=240)
    assert step_ns(whole) > step_ns(placed)
    with pytest.raises(ValueError, match="prefix in the pipeline's gaps: expected 1"):
        step_ns(placed, replicas=((), ()))


def test_what_overruns_a_step_on_shared_cores_runs_beside_what_is_left():
    """One core for two stages: a step takes all that there is to do."""
    stages = [(10, 10, 0), (14, 10, 0)]
    costs = step("gpipe", stages, 1, prefix=("filled", [100]), prefix_grain_ns=9)
    costs.cores_permille = 1000
    assert step_ns(costs) == 10 + 10 + 14 + 10 + 100


@pytest.mark.parametrize(("frozen_share", "rounds"), FILLED)
def test_filled_gaps_of_stages_that_differ_cost_what_the_table_says(
    frozen_share, rounds
):
    """With stages that differ by 1 % grains meet operations; 1F1B has most gaps."""
    low, high = FILLED[frozen_share, rounds]
    for num_stages in (4, 8):
        mean = sum(
            filled_percent("1f1b", num_stages, frozen_share, rounds, 0.01, seed)
            for seed in range(5)
        )
        assert low - 2 <= mean / 5 <= high + 2


def split_lists(num_stages, num_microbatches):
    """F, I, W in turns, W within the num_stages - k micro-batches kept by stage k."""
    lines = []
    for k in range(num_stages):
        ahead = min(num_microbatches, num_stages - k)
        ops = [f"F{i}" for i in range(ahead)]
        for i in range(num_microbatches):
            ops += [f"I{i}", f"W{i}"]
            if ahead + i < num_microbatches:
                ops.append(f"F{ahead + i}")
        lines.append(f"{k}: " + " ".join(ops))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 8), (8, 16), (8, 8)])
def test_weight_gradients_within_each_stage_memory_cost_a_known_time(
    num_stages, num_microbatches
):
    """The last stage may keep one micro-batch, so it runs F I W in turns; its last I
    ends at K-1 + 3M-1, passes K-1 stages, and W of stage 0 follows: 3M + 2(K-1).
    Nothing can be faster under this limit."""
    costs = equal("zb-h1", num_stages, num_microbatches, unit=1)
    lists = split_lists(num_stages, num_microbatches)
    expected = 3 * num_microbatches + 2 * (num_stages - 1)
    assert step_ns(costs, lists=lists) == expected


def test_grains_behind_the_step_do_not_run_beside_each_other():
    """One device: a grain that began while gradients were reduced was still running
    when the rest was counted as done by the same device."""
    device = stage(UNIT, UNIT, UNIT, all_reduce_ns=UNIT // 10)
    frozen = ("replicated", [UNIT])
    costs = step("gpipe", [device], 1, prefix=frozen)
    assert step_ns(costs, prefix_mode="filled") == 4 * UNIT


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_filled_steps_are_no_shorter_than_the_devices_work(schedule):
    for seed in range(100):
        rng = random.Random(seed)
        stages, _ = random_stages(rng)
        for each in stages:
            each.all_reduce_ns = rng.randint(0, 2000) * each.has_backward
        count, frozen = rng.randint(1, 8), rng.randint(0, 3000)
        costs = step(schedule, stages, count, prefix=("replicated", [frozen]))
        work = count * (frozen + sum(columns(stages)[2]))
        assert step_ns(costs, prefix_mode="filled") * len(stages) >= work
