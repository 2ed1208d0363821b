"""The paper's rule: exact rows, float traps, gradient term, edges."""

import json
import logging
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autofreeze import AlphaCap, FreezeStatistics, Progress

ROWS = [
    (12, 1 / 5, [0, 3, 5, 6, 8, 9, 9, 10, 10, 11]),
    (12, 1 / 4, [0, 3, 6, 7, 9, 10, 10, 11, 11, 12]),
    (12, 1 / 3, [0, 4, 7, 9, 10, 11, 11, 12, 12, 12]),
    (12, 2 / 5, [0, 5, 8, 10, 11, 12, 12, 12, 12, 12]),
    (12, 1 / 2, [0, 6, 9, 11, 12, 12, 12, 12, 12, 12]),
    (12, 0.07, [0, 1, 2, 3, 4, 4, 5, 5, 6, 6]),
    (24, 1 / 3, [0, 8, 14, 17, 20, 21, 22, 23, 24, 24]),
]


def bound(num_units, alpha, **options):
    policy = AlphaCap(alpha, **{"gradient_term": False, **options})
    policy.bind(num_units)
    return policy


def decide(policy, epoch, norms=None):
    policy.observe(FreezeStatistics(None if norms is None else tuple(norms)))
    return policy.decide(Progress(epoch, step=10 * epoch))


@pytest.mark.parametrize("num_units, alpha, row", ROWS)
def test_alpha_cap_gives_the_paper_rows(num_units, alpha, row):
    policy = bound(num_units, alpha)
    assert [decide(policy, epoch) for epoch in range(10)] == row


def test_alpha_cap_survives_double_rounding():
    # 0.3 * 10 is 3.0000000000000004 in double precision.
    assert [decide(bound(10, 0.3), epoch) for epoch in (0, 1)] == [0, 3]


@settings(max_examples=60, deadline=None)
@given(
    num_units=st.sampled_from([1, 2, 12, 24, 96]),
    alpha=st.fractions(min_value=0, max_value=Fraction(19, 20), max_denominator=40),
)
def test_alpha_cap_equals_exact_arithmetic(num_units, alpha):
    policy = bound(num_units, float(alpha))
    for point in range(12):
        exact = num_units * (1 - (1 - alpha) ** point)
        # A fraction closer to a whole number than the slack counts as whole.
        expected = math.ceil(exact - Fraction(1, 10**9))
        assert decide(policy, point) == expected


@pytest.mark.parametrize("num_units", [0, 1, 24])
def test_alpha_cap_zero_never_freezes(num_units):
    policy = bound(num_units, 0.0)
    assert [decide(policy, epoch) for epoch in range(5)] == [0] * 5


@pytest.mark.parametrize("alpha", [1.5, 1.0, -0.1])
def test_alpha_cap_refuses_alpha_out_of_range(alpha):
    text = rf"alpha: expected a number in \[0, 1\), got {alpha:g}"
    with pytest.raises(ValueError, match=text):
        AlphaCap(alpha, gradient_term=False)


def test_alpha_cap_refuses_nan_and_text():
    with pytest.raises(ValueError, match=r"alpha: expected a number in \[0, 1\)"):
        AlphaCap(math.nan)
    with pytest.raises(TypeError, match="alpha: expected a number .*, got 'third'"):
        AlphaCap("third")


def test_alpha_cap_keeps_min_active_units():
    policy = bound(12, 1 / 2, min_active=4)
    assert [decide(policy, epoch) for epoch in range(5)] == [0, 6, 8, 8, 8]


def test_alpha_cap_refuses_min_active_above_units():
    policy = AlphaCap(0.5, min_active=5, gradient_term=False)
    text = r"min_active: expected a count in \[0, 4\], got 5"
    with pytest.raises(ValueError, match=text):
        policy.bind(4)


def test_alpha_cap_repeats_the_answer_of_a_point():
    policy = bound(12, 1 / 3)
    assert [decide(policy, epoch) for epoch in (0, 0, 1, 1, 1, 2)] == [0, 0, 4, 4, 4, 7]


def reference(num_units, alpha, rows):
    """The rule written out: paper section 3.1, equation 1."""
    frozen, whole, wanted = 0.0, 0, [0]
    for norms in rows:
        if whole < num_units:
            smallest = min(range(whole, num_units), key=lambda unit: norms[unit])
            cap = frozen + alpha * (num_units - frozen)
            frozen = min(smallest + 1, cap)
            whole = max(whole, math.ceil(frozen - 1e-9))
        wanted.append(whole)
    return wanted


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_units=st.integers(1, 24), alpha=st.floats(0, 0.95))
def test_gradient_term_equals_the_rule_and_stays_below_the_cap(data, num_units, alpha):
    value = st.floats(0, 100)
    rows = data.draw(
        st.lists(
            st.lists(value, min_size=num_units, max_size=num_units),
            min_size=1,
            max_size=8,
        )
    )
    policy = bound(num_units, alpha, gradient_term=True)
    cap = bound(num_units, alpha)
    decisions = [decide(policy, 0)]
    caps = [decide(cap, 0)]
    for point, norms in enumerate(rows, start=1):
        decisions.append(decide(policy, point, norms))
        caps.append(decide(cap, point))
    assert decisions == reference(num_units, alpha, rows)
    assert decisions == sorted(decisions)
    assert all(ours <= limit for ours, limit in zip(decisions, caps, strict=True))


def test_gradient_term_breaks_ties_downwards():
    assert decide(bound(6, 0.9, gradient_term=True), 1, [3, 1, 2, 1, 1, 5]) == 2


def test_gradient_term_ignores_frozen_units():
    policy = bound(6, 0.5, gradient_term=True)
    assert decide(policy, 1, [9, 9, 1, 9, 9, 9]) == 3
    assert decide(policy, 2, [0, 0, math.nan, 9, 1, 9]) == 5


def test_gradient_term_needs_norms():
    text = "gradient_norms: expected 6 values, one per unit, got none"
    with pytest.raises(ValueError, match=text):
        decide(bound(6, 0.5, gradient_term=True), 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_statistic_freezes_nothing_and_warns(bad, caplog):
    policy = bound(6, 0.5, gradient_term=True)
    assert decide(policy, 1, [9, 9, 1, 9, 9, 9]) == 3
    with caplog.at_level(logging.WARNING):
        assert decide(policy, 2, [0, 0, 0, 9, bad, 1]) == 3
    assert (
        f"gradient_norms of unit 4 at step 20: expected a finite number, got {bad}"
        in (caplog.text)
    )
    assert decide(policy, 3, [0, 0, 0, 9, 9, 1]) == 5


def test_alpha_cap_state_round_trips_through_json():
    first = bound(12, 1 / 3)
    expected = [decide(first, epoch) for epoch in range(10)]
    start = bound(12, 1 / 3)
    for epoch in range(4):
        decide(start, epoch)
    state = json.loads(json.dumps(start.state_dict()))
    resumed = bound(12, 1 / 3)
    resumed.load_state_dict(state)
    assert [decide(resumed, epoch) for epoch in range(4, 10)] == expected[4:]


def test_alpha_cap_refuses_a_state_of_a_larger_model():
    large = bound(12, 0.5)
    decide(large, 1)
    text = r"policy state frozen: expected a number in \[0, 4\], got 6"
    with pytest.raises(ValueError, match=text):
        bound(4, 0.5).load_state_dict(large.state_dict())
