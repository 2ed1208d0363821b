"""The exact solvers against enumeration, and their properties."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.planner import solvers
from tests.planner.instances import (
    PLENTY,
    all_cuts,
    costs_lists,
    random_costs,
    stage_sums,
)


def min_max(costs, num_stages, *, boundaries=None, memory=(None, PLENTY), allowed=None):
    return solvers.min_max_cuts(
        costs,
        num_stages,
        boundary_costs=boundaries,
        layer_bytes=memory[0],
        stage_bytes=memory[1],
        cut_allowed=allowed,
    )


def enumerate_min_max(costs, num_stages, boundaries, memory, allowed):
    best = None
    for cuts in all_cuts(len(costs), num_stages, allowed):
        if max(stage_sums(memory[0], cuts)) > memory[1]:
            continue
        value = max(
            sum(costs[a:b]) + boundaries[a] + boundaries[b] for a, b in pairwise(cuts)
        )
        if best is None or value < best[0]:
            best = value, list(cuts)
    return best


def random_instance(rng):
    n = rng.randint(1, 11)
    num_stages = rng.randint(1, min(n, 5))
    costs = random_costs(rng, n)
    boundaries = [0] * (n + 1)
    if rng.random() < 0.5:
        boundaries[1:n] = [rng.randint(0, 40) for _ in range(n - 1)]
    memory = random_costs(rng, n)
    cap = PLENTY
    if rng.random() < 0.6:  # tight: often the only limit that matters
        cap = int(sum(memory) / num_stages * rng.uniform(0.9, 1.8))
    allowed = [rng.random() < 0.8 for _ in range(n + 1)]
    return costs, num_stages, boundaries, (memory, cap), allowed


def test_partition_equals_brute_force_on_500_random_instances():
    rng = random.Random(20210718)
    infeasible = 0
    for _ in range(500):
        costs, num_stages, boundaries, memory, allowed = random_instance(rng)
        expected = enumerate_min_max(costs, num_stages, boundaries, memory, allowed)
        found = min_max(
            costs, num_stages, boundaries=boundaries, memory=memory, allowed=allowed
        )
        assert found == expected, (costs, num_stages, boundaries, memory, allowed)
        infeasible += expected is None
    assert 50 < infeasible < 350  # both outcomes are exercised


def test_staircase_holds_the_best_sum_on_300_random_instances():
    rng = random.Random(7)
    for _ in range(300):
        n = rng.randint(1, 10)
        num_stages = rng.randint(1, min(n, 4))
        forward, backward = random_costs(rng, n), random_costs(rng, n)
        memory = random_costs(rng, n)
        cap = int(sum(memory) / num_stages * rng.uniform(1.0, 3.0))
        allowed = [rng.random() < 0.9 for _ in range(n + 1)]
        sums = [
            max(stage_sums(forward, cuts)) + max(stage_sums(backward, cuts))
            for cuts in all_cuts(n, num_stages, allowed)
            if max(stage_sums(memory, cuts)) <= cap
        ]
        points = solvers.gpipe_staircase(
            forward,
            backward,
            num_stages,
            layer_bytes=memory,
            stage_bytes=cap,
            cut_allowed=allowed,
        )
        assert bool(points) == bool(sums)
        if sums:
            assert min(f + b for f, b, _ in points) == min(sums)
        for largest_forward, largest_backward, cuts in points:
            assert largest_forward == max(stage_sums(forward, cuts))
            assert largest_backward == max(stage_sums(backward, cuts))
            assert max(stage_sums(memory, cuts)) <= cap
        assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(points))


@given(costs_lists, st.data())
def test_partition_keeps_order_and_leaves_no_stage_empty(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    _, cuts = min_max(costs, num_stages)
    assert cuts[0] == 0 and cuts[-1] == len(costs) and len(cuts) == num_stages + 1
    assert all(a < b for a, b in pairwise(cuts))


@given(costs_lists, st.data())
def test_bottleneck_is_at_least_the_largest_layer_and_the_mean(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    value, cuts = min_max(costs, num_stages)
    assert value >= max(max(costs), -(-sum(costs) // num_stages))
    assert value == max(stage_sums(costs, cuts))


@given(costs_lists)
def test_bottleneck_does_not_grow_with_the_number_of_stages(costs):
    values = [min_max(costs, k)[0] for k in range(1, len(costs) + 1)]
    assert values == sorted(values, reverse=True)


@given(costs_lists, st.integers(1, 1_000_000), st.data())
def test_scaling_all_costs_scales_the_bottleneck_and_keeps_the_cuts(
    costs, factor, data
):
    num_stages = data.draw(st.integers(1, len(costs)))
    value, cuts = min_max(costs, num_stages)
    scaled = min_max([factor * c for c in costs], num_stages)
    assert scaled == (factor * value, cuts)


@given(costs_lists, st.data())
def test_reversed_layers_have_the_same_bottleneck(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    assert min_max(costs, num_stages)[0] == min_max(costs[::-1], num_stages)[0]


@given(costs_lists, st.data())
def test_a_layer_that_costs_nothing_changes_nothing(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    position = data.draw(st.integers(0, len(costs)))
    longer = [*costs[:position], 0, *costs[position:]]
    assert min_max(longer, num_stages)[0] == min_max(costs, num_stages)[0]


@given(costs_lists, st.data())
def test_bottleneck_does_not_grow_with_the_memory(costs, data):
    n = len(costs)
    num_stages = data.draw(st.integers(1, n))
    bytes_ = data.draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    caps = sorted(data.draw(st.lists(st.integers(0, 600), min_size=2, max_size=4)))
    found = [min_max(costs, num_stages, memory=(bytes_, cap)) for cap in caps]
    values = [float("inf") if f is None else f[0] for f in found]
    assert values == sorted(values, reverse=True)


def test_more_stages_than_layers_have_no_partition():
    assert min_max([1, 2, 3], 4) is None


def test_sixty_layers_with_uneven_boundaries_match_the_quadratic_table():
    rng = random.Random(3)
    n, num_stages = 60, 7
    costs = [rng.randint(0, 1000) for _ in range(n)]
    boundaries = [0, *(rng.randint(0, 300) for _ in range(n - 1)), 0]
    prefix = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    infinite = 1 << 60
    best = [0] + [infinite] * n
    for _ in range(num_stages):
        best = [infinite] + [
            min(
                max(best[i], prefix[j] - prefix[i] + boundaries[i] + boundaries[j])
                for i in range(j)
            )
            for j in range(1, n + 1)
        ]
    assert min_max(costs, num_stages, boundaries=boundaries)[0] == best[n]
