"""Promises of the min-max solver that hold for every row of layers."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.testing import solvers
from pipetransformer.testing.solvers import Costs, Limits, min_max_cuts
from tests.planner.instances import costs_lists, stage_sums

each = settings(derandomize=True, deadline=None, max_examples=60)


@each
@given(costs_lists, st.data())
def test_partition_keeps_order_and_leaves_no_stage_empty(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    _, cuts = min_max_cuts(costs, num_stages)
    assert cuts[0] == 0 and cuts[-1] == len(costs) and len(cuts) == num_stages + 1
    assert all(a < b for a, b in pairwise(cuts))


@each
@given(costs_lists, st.data())
def test_bottleneck_is_at_least_the_largest_layer_and_the_mean(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    value, cuts = min_max_cuts(costs, num_stages)
    assert value >= max(max(costs), -(-sum(costs) // num_stages))
    assert value == max(stage_sums(costs, cuts))


@each
@given(costs_lists)
def test_bottleneck_does_not_grow_with_the_number_of_stages(costs):
    values = [min_max_cuts(costs, k)[0] for k in range(1, len(costs) + 1)]
    assert values == sorted(values, reverse=True)


@each
@given(costs_lists, st.integers(1, 1_000_000), st.data())
def test_scaling_all_costs_scales_the_bottleneck_and_keeps_the_cuts(
    costs, factor, data
):
    num_stages = data.draw(st.integers(1, len(costs)))
    value, cuts = min_max_cuts(costs, num_stages)
    scaled = min_max_cuts([factor * c for c in costs], num_stages)
    assert scaled == (factor * value, cuts)


@each
@given(costs_lists, st.data())
def test_bottleneck_does_not_grow_when_more_layers_freeze(costs, data):
    boundary = data.draw(st.integers(0, len(costs) - 1))
    num_stages = data.draw(st.integers(1, len(costs) - boundary))
    active = min_max_cuts(costs[boundary:], num_stages)[0]
    assert active <= min_max_cuts(costs, num_stages)[0]


@each
@given(costs_lists, st.data())
def test_reversed_layers_have_the_same_bottleneck(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    assert (
        min_max_cuts(costs, num_stages)[0] == min_max_cuts(costs[::-1], num_stages)[0]
    )


@each
@given(costs_lists, st.data())
def test_a_layer_that_costs_nothing_changes_nothing(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    position = data.draw(st.integers(0, len(costs)))
    longer = [*costs[:position], 0, *costs[position:]]
    assert min_max_cuts(longer, num_stages)[0] == min_max_cuts(costs, num_stages)[0]


@each
@given(costs_lists, st.data())
def test_bottleneck_does_not_grow_with_the_memory(costs, data):
    n = len(costs)
    num_stages = data.draw(st.integers(1, n))
    bytes_ = data.draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    caps = sorted(data.draw(st.lists(st.integers(0, 600), min_size=2, max_size=4)))
    found = [
        min_max_cuts(costs, num_stages, limits=Limits(bytes_, cap)) for cap in caps
    ]
    values = [float("inf") if f is None else f[0] for f in found]
    assert values == sorted(values, reverse=True)


@each
@given(costs_lists, st.booleans(), st.data())
def test_reversed_boundaries_have_the_same_bottleneck(costs, overlapped, data):
    n = len(costs)
    num_stages = data.draw(st.integers(1, n))
    inner = data.draw(st.lists(st.integers(0, 99), min_size=n - 1, max_size=n - 1))
    row = Costs(costs, [0, *inner, 0], overlapped)
    mirrored = Costs(costs[::-1], [0, *inner[::-1], 0], overlapped)
    value = min_max_cuts(row, num_stages)[0]
    assert value == min_max_cuts(mirrored, num_stages)[0]


@each
@given(costs_lists, st.data())
def test_copies_cost_less_where_they_overlap(costs, data):
    n = len(costs)
    num_stages = data.draw(st.integers(1, n))
    inner = data.draw(st.lists(st.integers(0, 99), min_size=n - 1, max_size=n - 1))
    edges = [0, *inner, 0]
    free, _ = min_max_cuts(costs, num_stages)
    alongside, _ = min_max_cuts(Costs(costs, edges, overlapped=True), num_stages)
    between, _ = min_max_cuts(Costs(costs, edges), num_stages)
    assert free <= alongside <= between


@each
@given(costs_lists, st.data())
def test_equal_counts_on_all_stages_are_an_ordinary_limit(costs, data):
    n = len(costs)
    num_stages = data.draw(st.integers(1, n))
    bytes_ = data.draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    cap = data.draw(st.integers(0, 600))
    kept = Limits([0] * n, cap, bytes_, [3] * num_stages)
    plain = Limits([3 * b for b in bytes_], cap)
    assert min_max_cuts(costs, num_stages, limits=kept) == min_max_cuts(
        costs, num_stages, limits=plain
    )


@pytest.mark.parametrize("overlapped", [False, True])
def test_nanoseconds_and_microseconds_are_cut_alike(overlapped):
    layers, edges = [31, 7, 7, 12, 55, 3, 20, 20], [0, 9, 40, 2, 8, 8, 1, 30, 0]
    for num_stages in range(1, 9):
        value, cuts = min_max_cuts(Costs(layers, edges, overlapped), num_stages)
        in_ns = Costs([1000 * c for c in layers], [1000 * c for c in edges], overlapped)
        assert min_max_cuts(in_ns, num_stages) == (1000 * value, cuts)


def test_of_equally_good_cuts_the_lexicographically_first_are_taken():
    assert min_max_cuts([5, 0, 0, 5], 2) == (5, [0, 1, 4])
    assert min_max_cuts([1, 1, 1, 9, 1, 1], 4) == (9, [0, 1, 3, 4, 6])


@pytest.mark.parametrize("num_stages", [-1, 0, 4])
def test_impossible_numbers_of_stages_have_no_partition(num_stages):
    assert min_max_cuts([1, 2, 3], num_stages) is None
    assert solvers.gpipe_staircase([1, 2, 3], [1, 2, 3], num_stages) == []
    assert solvers.cheapest_cuts([0, 1, 1, 0], num_stages) is None
    assert solvers.best_cuts([1, 2, 3], None, num_stages, repeats=1) is None


def test_a_first_stage_that_holds_nothing_is_no_partition():
    # Layer 0 fits only where fewer micro-batches are kept: on stage 1, which
    # would leave stage 0 empty. A walk that skips stages must count segments.
    limits = Limits([10, 10], 15, [10, 0], [1, 0])
    assert min_max_cuts([1, 1], 2, limits=limits) is None
    assert solvers.min_max_memory(limits, 2, 2) == (20, [0, 1, 2])


def test_a_cut_that_only_fills_up_the_stages_counts_with_its_copies():
    # All layers fit on one stage at no cost; the second cut pays for its copy.
    row = Costs([0, 0], [0, 7, 0], overlapped=True)
    assert min_max_cuts(row, 2) == (7, [0, 1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: min_max_cuts([1, -1], 1), "costs: expected entries from 0, got -1"),
        (
            lambda: min_max_cuts(Costs([1], [0]), 1),
            "costs: boundaries: expected 2 entries, got 1",
        ),
        (
            lambda: min_max_cuts([1], 1, limits=Limits(cut_allowed=[True])),
            "cut_allowed: expected 2 entries, got 1",
        ),
        (
            lambda: min_max_cuts([1], 1, limits=Limits(kept_bytes=[1])),
            "microbatches_kept: expected one per stage, got None",
        ),
        (
            lambda: min_max_cuts([1], 1, limits=Limits(microbatches_kept=[1, 1])),
            "microbatches_kept: expected 1 entries, got 2",
        ),
        (lambda: min_max_cuts([2**61], 1), r"costs: expected a sum up to 2\*\*60"),
        (
            lambda: solvers.gpipe_staircase([1, 2], [1], 1),
            "backward: expected 2 entries, got 1",
        ),
        (
            lambda: solvers.best_cuts([1], None, 1, repeats=-1),
            "repeats: expected 0 to",
        ),
        (
            lambda: solvers.best_cuts(
                [1], None, 1, repeats=1, reduce_costs=[1], reduce_slack=[2, 1]
            ),
            "reduce_slack: expected rising entries",
        ),
        (
            lambda: solvers.best_cuts(
                [1], None, 1, repeats=1, cut_costs=[0, 1], hiding_cut_costs=[0, 2]
            ),
            "hiding_cut_costs: expected at most cut_costs",
        ),
    ],
)
def test_solvers_name_what_is_wrong_with_their_lists(call, message):
    with pytest.raises(ValueError, match=message):
        call()
