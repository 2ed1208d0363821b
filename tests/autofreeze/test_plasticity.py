"""Plasticity: its formula, and units that freeze when theirs has levelled off."""

import logging
import math

import numpy as np
import pytest
import torch

from pipetransformer.autofreeze import (
    ActivationChange,
    FreezeStatistics,
    Plasticity,
    Progress,
    replay,
)
from pipetransformer.autofreeze.plasticity import averaged, slope_of
from pipetransformer.autofreeze.similarity import plasticity_of, similarities

UNITS = 4


def directly(now, before):
    """Egeria's formula in NumPy."""

    def normalised(values):
        flat = values.reshape(len(values), -1).astype(np.float64)
        products = flat @ flat.T
        return products / np.linalg.norm(products, axis=1, keepdims=True)

    apart = normalised(now) - normalised(before)
    return np.linalg.norm(apart) ** 2 / len(now) ** 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plasticity_is_that_of_the_formula(dtype):
    generator = torch.Generator().manual_seed(1)
    one, other = torch.randn(2, 7, 3, 5, generator=generator).to(dtype).unbind()
    found = plasticity_of(similarities(one), similarities(other))
    expected = directly(one.double().numpy(), other.double().numpy())
    assert found == pytest.approx(expected, rel=1e-4)
    assert 0 < found <= 4 / 7


def test_equal_or_scaled_activations_have_no_plasticity():
    values = torch.randn(6, 10)
    assert plasticity_of(similarities(values), similarities(values)) == 0
    scaled = plasticity_of(similarities(values), similarities(40 * values))
    assert scaled == pytest.approx(0, abs=1e-12)
    assert not similarities(torch.zeros(3, 2)).any()


def test_changes_are_the_mean_over_the_replicas_that_know_them():
    first, joined = ActivationChange(), ActivationChange()
    first.measure(0, [torch.eye(2)])
    assert first.own is None and first.settle([None, None]) is None
    first.measure(1, [torch.tensor([[1.0, 0.0], [1.0, 0.0]])])
    joined.measure(1, [torch.eye(2)])
    expected = directly(np.array([[1.0, 0], [1, 0]]), np.eye(2))
    assert first.own == pytest.approx([expected]) and joined.own is None
    assert first.settle([first.own, joined.own]) == first.own
    assert first.settle([[1.0], [4.0]]) == [2.5]
    assert first.take() == (2.5,) and first.take() is None


def test_a_point_that_is_measured_again_is_left_as_it_is():
    changes = ActivationChange()
    changes.measure(3, [torch.eye(2)])
    changes.measure(4, [torch.ones(2, 2)])
    found = changes.own
    changes.measure(4, [torch.ones(2, 2)])
    assert changes.own == found and found[0] > 0


def test_only_the_point_right_before_is_compared_with():
    changes = ActivationChange()
    changes.measure(3, [torch.eye(2)])
    changes.measure(6, [torch.ones(2, 2)])
    assert changes.own is None
    changes.measure(7, [torch.ones(2, 2)])
    assert changes.own == [0.0]


def test_autocast_does_not_round_similarities():
    values = torch.randn(8, 4000)
    expected = similarities(values)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(similarities(values), expected)


def test_slopes_and_averages():
    assert slope_of([1, 3, 5, 7]) == pytest.approx(2)
    generator = np.random.default_rng(3)
    for size in (2, 3, 6):
        values = generator.normal(size=size)
        expected = np.polyfit(np.arange(size), values, 1)[0]
        assert slope_of(list(values)) == pytest.approx(expected)
    assert averaged([3.0, 5.0, 10.0], 3) == [3.0, 4.0, 6.0]
    assert averaged([1.0, 3.0, 5.0, 10.0], 2) == [4.0, 7.5]


def bound(**options):
    policy = Plasticity(**options)
    policy.bind(UNITS)
    return policy


def decide(policy, point, values, rate=1e-3):
    values = None if values is None else tuple(values)
    policy.observe(FreezeStatistics(plasticity=values))
    return policy.decide(Progress(point, step=10 * point, learning_rate=rate))


def planted(point):
    """Unit k has settled after k * 4 points; the last one never does."""
    levels = [math.exp(-max(0.0, point) / (1 + 2 * k)) for k in range(UNITS - 1)]
    return [*levels, 1.0 + 0.5 * (-1) ** point]


def test_units_freeze_from_the_front_as_they_settle():
    policy = bound(window=2, patience=2)
    found = [decide(policy, point, planted(point)) for point in range(1, 40)]
    assert found == sorted(found), "nothing thaws"
    assert found[0] == 0 and found[-1] == UNITS - 1
    firsts = [found.index(n) for n in range(1, UNITS)]
    assert firsts == sorted(set(firsts)), "one after the other"
    again = replay(lambda: Plasticity(window=2, patience=2), policy.log)
    assert again == found


def test_a_unit_waits_for_those_before_it():
    policy = bound(window=2, patience=1)
    for point in range(1, 30):
        values = [float(point**2), 0.0, 0.0, 0.0]
        assert decide(policy, point, values) == 0
    assert "unit 0 changes at" in policy.log[-1]["why"]


def test_units_that_never_change_freeze_but_for_the_last():
    policy = bound(window=3, patience=2)
    found = [decide(policy, point, [0.0] * UNITS) for point in range(1, 7)]
    assert found == [0, 0, 0, UNITS - 1, UNITS - 1, UNITS - 1]


def test_a_fall_of_the_learning_rate_thaws_all_and_halves_the_window():
    policy = bound(window=4, patience=1)
    zeros = [0.0] * UNITS
    assert [decide(policy, p, zeros) for p in range(1, 5)] == [0, 0, 0, UNITS - 1]
    assert decide(policy, 5, zeros, rate=1.1e-4) == UNITS - 1
    assert decide(policy, 6, zeros, rate=1e-4) == 0
    assert "all units thaw" in policy.log[-1]["why"]
    assert policy.state_dict()["window"] == 2
    # From the new rate on; windows are half as long.
    assert [decide(policy, p, zeros, rate=1e-4) for p in (7, 8)] == [0, UNITS - 1]
    assert decide(policy, 9, zeros, rate=9e-5) == UNITS - 1
    assert replay(lambda: Plasticity(window=4, patience=1), policy.log) == [
        entry["decision"] for entry in policy.log
    ]


def test_a_point_without_a_comparison_changes_nothing():
    policy = bound(window=2, patience=1)
    zeros = [0.0] * UNITS
    assert [decide(policy, 1, None), decide(policy, 2, zeros)] == [0, 0]
    assert policy.log[0]["why"] == "nothing to compare with yet"
    assert decide(policy, 3, zeros) == UNITS - 1
    assert decide(policy, 4, None) == UNITS - 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_freezes_nothing(bad, caplog):
    policy = bound(window=2, patience=1)
    decide(policy, 1, [0.0] * UNITS)
    with caplog.at_level(logging.WARNING):
        assert decide(policy, 2, [0.0, bad, 0.0, 0.0]) == 0
    assert "plasticity of unit 1 at step 20: expected a finite number" in caplog.text
    assert decide(policy, 3, [0.0] * UNITS) == UNITS - 1


def test_the_state_goes_on_in_another_policy():
    whole, first = bound(window=2), bound(window=2)
    expected = [decide(whole, p, planted(p)) for p in range(1, 30)]
    found = [decide(first, p, planted(p)) for p in range(1, 12)]
    second = bound(window=2)
    second.load_state_dict(first.state_dict())
    found += [decide(second, p, planted(p)) for p in range(12, 30)]
    assert found == expected


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("values", [1.0] * (UNITS + 1), "expected 4 for each of at most 3 points"),
        ("values", [1.0] * (4 * UNITS), "expected 4 for each of at most 3 points"),
        ("steepest", [1.0], "steepest: expected 4 numbers, got 1"),
        ("settled", [True] * UNITS, "settled: expected numbers"),
        ("window", 3, "window: expected a count in \\[0, 2\\], got 3"),
        ("num_frozen", 5, "expected a count in \\[0, 4\\]"),
    ],
)
def test_a_state_of_another_kind_is_refused(field, value, problem):
    policy = bound(window=2)
    decide(policy, 1, [0.0] * UNITS)
    state = {**policy.state_dict(), field: value}
    with pytest.raises(ValueError, match=problem):
        policy.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"window": 1}, ValueError, "window: expected at least 2, got 1"),
        ({"window": 2.0}, TypeError, "window: expected an int"),
        ({"patience": 0}, ValueError, "patience: expected at least 1, got 0"),
        ({"tolerance": 1}, ValueError, r"expected a number in \(0, 1\), got 1"),
        ({"tolerance": "a"}, TypeError, "tolerance: expected a number, got 'a'"),
    ],
)
def test_bad_settings_are_refused(options, error, problem):
    with pytest.raises(error, match=problem):
        Plasticity(**options)
