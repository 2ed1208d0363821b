"""Simulated times against formulas, on random pipelines with forward-only stages."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.costs import columns, random_stages, simulate, stage, step, step_ns

times = st.integers(0, 10**6)


@st.composite
def pipelines(draw):
    num_stages = draw(st.integers(1, 8))
    first = draw(st.integers(0, num_stages - 1))
    stages = []
    for k in range(num_stages):
        backward = (draw(times), draw(times)) if k >= first else (0, 0)
        stages.append(stage(draw(times), *backward, has_backward=k >= first))
    return stages, draw(st.integers(1, 12))


def gpipe_ns(stages, num_microbatches):
    forward, backward, both = columns(stages)
    return sum(both) + (num_microbatches - 1) * (max(forward) + max(backward))


def one_f_one_b_bound(stages, num_microbatches):
    """Stage k starts after a forward of the stages before it, is busy for M of its own
    operations, and a backward of the stages before it follows its last."""
    forward, backward, both = columns(stages)
    whole = max(
        sum(forward[:k]) + num_microbatches * both[k] + sum(backward[:k])
        for k in range(len(stages))
    )
    return max(whole, sum(both))


def adapipe_ns(stages, num_microbatches):
    """The recursion of AdaPipe for 1F1B: warm-up, ending and the slowest stage."""
    forward, backward, both = columns(stages)
    last = len(stages) - 1
    warm_up, ending = forward[last], backward[last]
    for k in reversed(range(last)):
        warm_up, ending = (
            forward[k] + max(warm_up + backward[k + 1], (last - k) * forward[k]),
            backward[k] + max(ending + forward[k + 1], (last - k) * backward[k]),
        )
    return warm_up + ending + (num_microbatches - len(stages)) * max(both)


@given(pipelines())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_gpipe_takes_the_closed_form(pipeline):
    stages, num_microbatches = pipeline
    costs = step("gpipe", stages, num_microbatches)
    assert step_ns(costs) == gpipe_ns(stages, num_microbatches)


def test_gpipe_takes_the_closed_form_on_3000_random_pipelines():
    rng = random.Random(20210)
    for _ in range(3000):
        stages, _ = random_stages(rng)
        num_microbatches = rng.randint(1, 20)
        costs = step("gpipe", stages, num_microbatches)
        expected = gpipe_ns(stages, num_microbatches)
        assert step_ns(costs) == expected
        # Without copies the order rule of the op lists costs nothing.
        assert step_ns(costs, at_most_one_ahead=True) == expected


def test_gpipe_with_overlapped_copies_takes_the_closed_form():
    """Each copy once, and the slower of computes and copies for the other M - 1."""
    rng = random.Random(20211)
    slower_with_rule = 0
    for _ in range(1500):
        stages, _ = random_stages(rng, copies=True)
        num_microbatches = rng.randint(1, 20)
        forward, backward, both = columns(stages)
        forward_copies = [s.forward_copy_ns for s in stages]
        backward_copies = [s.backward_copy_ns for s in stages]
        expected = sum(both) + sum(forward_copies) + sum(backward_copies)
        expected += (num_microbatches - 1) * (
            max(forward + forward_copies) + max(backward + backward_copies)
        )
        costs = step("gpipe", stages, num_microbatches)
        assert step_ns(costs) == expected
        ruled = step_ns(costs, at_most_one_ahead=True)
        assert ruled >= expected
        slower_with_rule += ruled > expected
    assert slower_with_rule > 0  # F + copy + F may exceed two of the slowest


def test_order_rule_costs_no_time_where_copies_take_none():
    """So it can be left out of the simulation; 1F1B and ZB-H1 imply it."""
    rng = random.Random(20212)
    for schedule in ("1f1b", "zb-h1"):
        for _ in range(500):
            stages, _ = random_stages(rng)
            costs = step(schedule, stages, rng.randint(1, 20))
            assert step_ns(costs) == step_ns(costs, at_most_one_ahead=True)


def test_1f1b_never_beats_its_lower_bound_on_6000_random_pipelines():
    rng = random.Random(20213)
    for _ in range(6000):
        stages, _ = random_stages(rng, max_stages=6)
        num_microbatches = len(stages) + rng.randint(0, 12)
        simulated = step_ns(step("1f1b", stages, num_microbatches))
        assert one_f_one_b_bound(stages, num_microbatches) <= simulated


def test_adapipe_recursion_is_no_lower_bound():
    """Rarely above (5 of 60,000 random pipelines, at most 2 %), but above."""
    stages = [stage(0, 60), stage(40, 3), stage(0, 0), stage(2, 60)]
    assert adapipe_ns(stages, 10) == 735
    assert step_ns(step("1f1b", stages, 10)) == 723


def test_1f1b_equals_gpipe_for_equal_stages_and_gains_where_some_only_run_forward():
    equal = [(50, 30, 70)] * 5
    assert step_ns(step("1f1b", equal, 12)) == step_ns(step("gpipe", equal, 12))
    half = [stage(90, has_backward=False), stage(30, 60, 0)]
    gpipe, one_f_one_b = (
        step_ns(step(schedule, half, 40)) for schedule in ("gpipe", "1f1b")
    )
    assert one_f_one_b < 0.65 * gpipe


def test_recomputation_adds_its_forwards_to_the_backwards():
    """Always: R is part of each B, but starts before the gradient arrives."""
    stages = [stage(100, 60, 40, recompute_ns=100)]
    result = simulate(step("gpipe", stages, 3, num_recomputed=3))
    assert result.step_ns == 3 * 300
    result = simulate(step("gpipe", stages, 3, num_recomputed=2))
    assert result.step_ns == 3 * 200 + 2 * 100
    # Two stages: the first one recomputes while the last one still runs backward.
    stages = [stage(100, 60, 40, recompute_ns=100) for _ in range(2)]
    early = step_ns(step("gpipe", stages, 1, num_recomputed=1))
    assert early == 100 + 100 + 100 + 100 + 100
