"""The exact solvers against enumeration and against tables without shortcuts."""

import random
from itertools import accumulate, pairwise

import pytest

from pipetransformer.testing import solvers
from pipetransformer.testing.solvers import Costs, Limits
from tests.planner.instances import random_costs
from tests.planner.solver_oracles import (
    Instance,
    enumerate_best,
    largest,
    min_max_table,
    random_instance,
    random_limits,
    stage_cost,
)

NUM_INSTANCES = 1000  # of each of the six seeds


@pytest.mark.parametrize("seed", range(6))
def test_all_solvers_equal_enumeration_on_1000_random_instances(seed):
    rng = random.Random(seed)
    feasible = 0
    for _ in range(NUM_INSTANCES):
        given = random_instance(rng)
        expected = enumerate_best(given)
        shape, limits = given.num_stages, given.limits
        memory = solvers.min_max_memory(limits, given.num_layers, shape)
        assert memory == expected.get("memory"), given
        found = solvers.min_max_cuts(given.forward, shape, limits=limits)
        assert found == expected.get("min_max"), given
        cheapest = solvers.cheapest_cuts(given.cut_costs, shape, limits=limits)
        assert cheapest == expected.get("cheapest"), given
        check_staircase(given, expected.get("gpipe"))
        check_best(given, expected.get("best"))
        feasible += "min_max" in expected
    assert 0.6 < feasible / NUM_INSTANCES < 0.9  # both outcomes are exercised


def check_staircase(given, expected):
    points = solvers.gpipe_staircase(
        given.forward, given.backward, given.num_stages, limits=given.limits
    )
    if expected is None:
        assert points == [], given
        return
    sums = [(forward + backward, cuts) for forward, backward, cuts in points]
    assert min(sums) == expected, given
    for forward, backward, cuts in points:
        assert forward == largest(given.forward, cuts)
        assert backward == largest(given.backward, cuts)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(points))


def check_best(given, expected):
    found = best_cuts(given)
    assert found == (expected and (*expected, True)), given
    if expected is not None:
        assert best_cuts(given, cutoff=expected[0]) == found, given
        assert best_cuts(given, cutoff=expected[0] - 1) is None, given


def best_cuts(given, **options):
    return solvers.best_cuts(
        given.forward,
        given.backward,
        given.num_stages,
        repeats=given.repeats,
        cut_costs=given.cut_costs,
        hiding_cut_costs=given.hiding_cut_costs,
        reduce_costs=given.reduce_costs,
        reduce_slack=given.reduce_slack,
        accumulation_steps=given.accumulation_steps,
        limits=given.limits,
        **options,
    )


@pytest.mark.parametrize("overlapped", [False, True])
def test_rows_of_up_to_64_layers_match_the_quadratic_table(overlapped):
    rng = random.Random(64 + overlapped)
    feasible = 0
    for _ in range(60):
        n = rng.randint(20, 64)
        num_stages = rng.randint(2, 8)
        edges = [0, *(rng.randint(0, 300) for _ in range(n - 1)), 0]
        costs = Costs(random_costs(rng, n), edges, overlapped)
        limits = random_limits(rng, n, num_stages)
        expected = min_max_table(costs, limits, num_stages)
        found = solvers.min_max_cuts(costs, num_stages, limits=limits)
        assert (found and found[0]) == expected, (costs, limits, num_stages)
        if found:
            assert largest(costs, found[1]) == expected
            feasible += 1
    assert 30 < feasible < 60


def test_staircase_of_longer_rows_matches_a_table_for_every_forward_cap():
    rng = random.Random(22)
    for _ in range(6):
        n, num_stages = 16, rng.randint(2, 6)
        forward = Costs([rng.randint(1, 40) for _ in range(n)])
        backward = Costs([rng.randint(1, 90) for _ in range(n)])
        caps = {
            stage_cost(forward, i, j) for i in range(n) for j in range(i + 1, n + 1)
        }
        best = min(
            cap + value
            for cap in caps
            if (
                value := min_max_table(
                    backward, Limits(forward.layers, cap), num_stages
                )
            )
            is not None
        )
        points = solvers.gpipe_staircase(forward, backward, num_stages)
        assert min(f + b for f, b, _ in points) == best


def test_one_row_for_both_directions_is_cut_as_by_min_max():
    rng = random.Random(5)
    for _ in range(200):
        given = random_instance(rng)
        found = solvers.best_cuts(
            given.forward, None, given.num_stages, repeats=3, limits=given.limits
        )
        least = solvers.min_max_cuts(
            given.forward, given.num_stages, limits=given.limits
        )
        assert found == (least and (3 * least[0], least[1], True))


def test_best_cuts_take_a_smaller_all_reduce_for_a_larger_stage():
    # Layer 0 holds nearly all parameters; alone on its stage it exposes 90, with
    # the even cut 100. Two repeats of one more unit cost less than the 10 saved.
    forward, reduced = [5, 5, 5, 6], [90, 10, 0, 0]
    even = solvers.best_cuts(forward, None, 2, repeats=2)
    assert even == (22, [0, 2, 4], True)
    slack = [0, 200, 200, 200, 200]
    found = solvers.best_cuts(
        forward, None, 2, repeats=1, reduce_costs=reduced, reduce_slack=slack
    )
    assert found == (16 + 90, [0, 1, 4], True)
    many = solvers.best_cuts(
        forward, None, 2, repeats=9, reduce_costs=reduced, reduce_slack=slack
    )
    assert many == (9 * 11 + 100, [0, 2, 4], True)


def test_an_all_reduce_that_steps_share_counts_for_less():
    # The same model: one more unit on the first stage alone saves 10 of all-reduce
    # and costs 5 in every step.
    forward, reduced = [5, 5, 5, 6], [90, 10, 0, 0]
    terms = dict(repeats=1, reduce_costs=reduced, reduce_slack=[0, *4 * [200]])
    two = solvers.best_cuts(forward, None, 2, accumulation_steps=2, **terms)
    assert two == (16 + 45, [0, 1, 4], True), "the first of two that are as good"
    three = solvers.best_cuts(forward, None, 2, accumulation_steps=3, **terms)
    assert three == (11 + 33, [0, 2, 4], True)


def test_a_slow_first_stage_hides_the_all_reduces_of_later_ones():
    # Backward 9 | 1: the last stage is done 3 x 8 before the first, and what its
    # cut copies back, 4 of 6, takes longer still.
    backward, reduced, slack = [9, 1], [0, 30], [0, 0, 0]
    terms = dict(repeats=3, reduce_costs=reduced, reduce_slack=slack)
    pipe = 3 * (1 + 9)
    found = solvers.best_cuts([1, 1], backward, 2, **terms)
    assert found == (pipe + 30 - 24, [0, 1, 2], True)
    terms.update(cut_costs=[0, 6, 0], hiding_cut_costs=[0, 4, 0])
    found = solvers.best_cuts([1, 1], backward, 2, **terms)
    assert found == (pipe + 6 + 30 - 24 - 4, [0, 1, 2], True)


def long_instance(seed, num_layers, num_stages, reduce_scale):
    """Too long to enumerate; the larger the scale, the more all-reduces decide."""
    rng = random.Random(seed)
    layers = [rng.randint(10**5, 10**7) for _ in range(num_layers)]
    inner = [rng.randint(10**4, 10**6) for _ in range(num_layers - 1)]
    edges = [0, *inner, 0]
    backward = [cost * rng.randint(18, 22) // 10 for cost in layers]
    return Instance(
        num_stages,
        Costs(layers, edges, overlapped=True),
        Costs(backward, edges, overlapped=True),
        Limits(),
        4 * num_stages - 1,
        [2 * edge for edge in edges],
        edges,
        [reduce_scale * rng.randint(10**4, 10**7) for _ in layers],
        list(accumulate(backward, initial=0)),
    )


@pytest.mark.parametrize("reduce_scale", [0, 1, 10])
def test_long_rows_are_solved_exactly_with_all_terms(reduce_scale):
    given = long_instance(1, 120, 12, reduce_scale)
    value, cuts, exact = best_cuts(given)
    assert exact and value == given.value(cuts)
    assert no_neighbour_is_better(given, value, cuts)


def test_where_too_many_labels_are_given_up_the_answer_says_so():
    # Here they are found all the same: this is the value with all labels kept.
    given = long_instance(0, 200, 32, 1000)
    value, cuts, exact = best_cuts(given)
    assert not exact and value == given.value(cuts)
    assert value == 47_738_704_500
    assert no_neighbour_is_better(given, value, cuts)


def no_neighbour_is_better(given, value, cuts):
    for k in range(1, given.num_stages):
        for shift in (-1, 1):
            moved = [*cuts[:k], cuts[k] + shift, *cuts[k + 1 :]]
            rising = all(a < b for a, b in pairwise(moved))
            if rising and given.value(moved) < value:
                return False
    return True
