"""AutoFreeze: the rule against its formula, what primes it, edges."""

import json
import logging
import math
import random

import numpy as np
import pytest

from pipetransformer.autofreeze import AutoFreeze, FreezeStatistics, Progress, replay
from pipetransformer.autofreeze.auto_freeze import percentile_of


def bound(num_units, percentile=50.0, **options):
    policy = AutoFreeze(percentile)
    policy.bind(num_units, **options)
    return policy


def decide(policy, point, norms):
    policy.observe(FreezeStatistics(gradient_l1=tuple(norms)))
    return policy.decide(Progress(point, step=10 * point))


def row(policy, *norms):
    return [decide(policy, point, each) for point, each in enumerate(norms, 1)]


def test_the_units_before_the_first_large_change_freeze():
    # Changes: 0.1, 0.2, 0.5, 0.3, 0.4; their median is 0.3.
    before, now = (10, 10, 10, 10, 10), (9, 12, 5, 13, 6)
    assert row(bound(5), before, now) == [0, 2], "the third one changed by more"
    assert row(bound(5, 0), before, now) == [0, 0], "the smallest change is reached"
    assert row(bound(5, 100), before, now) == [0, 2]
    assert row(bound(5, 25), before, now) == [0, 1], "a change that is equal stops it"


def test_a_first_unit_that_changes_most_stops_it():
    assert row(bound(4), (1, 1, 1, 1), (9, 1, 1, 1)) == [0, 0]


def test_equal_changes_freeze_nothing():
    assert row(bound(4), (1, 2, 3, 4), (2, 4, 6, 8)) == [0, 0]


def test_changes_are_those_between_two_intervals_and_not_since_the_first():
    # Unit 0 changed once, long ago; unit 1 changes now.
    assert row(bound(3), (4, 4, 4), (9, 4, 4), (9, 8, 4.1)) == [0, 0, 1]


def test_one_unit_always_stays_active():
    policy = bound(3)
    draw = random.Random(1)
    found = row(policy, *([draw.random() for _ in range(3)] for _ in range(200)))
    assert found[-1] == 2
    assert found == sorted(found)


def test_a_model_without_units_freezes_none():
    assert row(bound(0), (), ()) == [0, 0]


def test_500_random_statistics_give_what_the_formula_says():
    draw = random.Random(7)
    for _ in range(500):
        units = draw.randint(1, 12)
        percentile = draw.choice([0.0, 25.0, 50.0, 75.0, 100.0, draw.uniform(0, 100)])
        frozen = draw.randint(0, units - 1)
        policy = bound(units, percentile, starting_units=frozen)
        before = None
        for point in range(1, 5):
            # Eighths, so that changes are equal to each other and to the percentile.
            norms = np.array([draw.randint(1, 8) / 8 for _ in range(units)])
            if before is not None:
                eta = np.abs(before - norms)[frozen:] / before[frozen:]
                bar = np.percentile(eta, percentile)
                # Where rounding decides whether they are equal, either is right.
                if np.min(np.abs(eta - bar), where=eta != bar, initial=1) > 1e-9:
                    frozen += int(np.argmax(eta >= bar))
                    assert decide(policy, point, norms.tolist()) == frozen
                    before = norms
                    continue
            frozen, before = decide(policy, point, norms.tolist()), norms


@pytest.mark.parametrize(
    "values, percentile, expected",
    [
        ([3.0], 50, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        ([1.0, math.inf], 0, 1.0),
        ([1.0, math.inf], 50, math.inf),
        ([math.inf, math.inf], 50, math.inf),
    ],
)
def test_percentile_interpolates(values, percentile, expected):
    assert percentile_of(values, percentile) == expected


def test_a_gradient_that_appears_is_the_largest_change():
    assert row(bound(3), (0, 1, 1), (1, 1, 1)) == [0, 0]
    assert row(bound(3, 75), (0, 1, 1), (0, 1, 2)) == [0, 2], "none stays none"


def test_a_norm_that_is_no_number_freezes_nothing(caplog):
    policy = bound(3)
    with caplog.at_level(logging.WARNING):
        assert row(policy, (1, 1, 1), (1, math.nan, 2)) == [0, 0]
    assert "unit 1 at step 20" in caplog.text
    assert decide(policy, 3, (1, 1.1, 5)) == 1, "by what was measured before"


def test_points_without_norms_are_refused():
    with pytest.raises(ValueError, match="gradient_l1: expected 2 values"):
        bound(2).decide(Progress(1, 10))


def test_log_replays_and_a_state_goes_on():
    draw = random.Random(3)
    norms = [[draw.random() for _ in range(6)] for _ in range(8)]
    policy = bound(6)
    decisions = row(policy, *norms)
    assert replay(AutoFreeze, json.loads(json.dumps(policy.log))) == decisions
    first, second = bound(6), bound(6)
    row(first, *norms[:4])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [decide(second, point, norms[point - 1]) for point in range(5, 9)]
    assert rest == decisions[4:]


@pytest.mark.parametrize(
    "percentile, error", [(-1, ValueError), (101, ValueError), ("50", TypeError)]
)
def test_wrong_percentiles_are_refused(percentile, error):
    with pytest.raises(error, match="percentile: expected a number"):
        AutoFreeze(percentile)


def test_a_state_of_another_model_is_refused():
    policy = bound(3)
    with pytest.raises(ValueError, match="policy state norms: expected 3 numbers"):
        policy.load_state_dict({**policy.state_dict(), "norms": [1.0]})
