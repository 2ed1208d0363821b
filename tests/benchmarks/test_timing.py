"""Which samples count as undisturbed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.child import foreign_cpu_s
from harness.timing import Sample, measured, select_clean


def _kept(*samples):
    return select_clean(samples).kept


def test_sample_that_waited_for_a_core_is_dropped_and_counted():
    clean, disturbed = Sample(10.0, 19.0), Sample(12.0, 19.0)
    selection = select_clean([clean, disturbed, clean])
    assert selection.kept == (0, 2)
    (reason,) = selection.reasons.items()
    text = "disturbed: 1.58 cores busy, undisturbed 1.90; CPU time of others: unknown"
    assert reason == (1, text)


def test_sample_within_the_tolerance_is_kept():
    assert _kept(Sample(10.0, 19.0), Sample(10.5, 19.0)) == (0, 1)


def test_slow_sample_that_used_the_cores_is_kept():
    assert _kept(Sample(10.0, 19.0), Sample(20.0, 38.0)) == (0, 1)


def test_low_ratio_that_others_cannot_explain_is_kept():
    # 2.8 core seconds are missing; others used 0.1, which stop at most 0.19.
    assert _kept(Sample(10.0, 19.0, 0.1), Sample(12.0, 20.0, 0.1)) == (0, 1)


def test_low_ratio_that_others_explain_is_dropped():
    assert _kept(Sample(10.0, 19.0, 0.1), Sample(12.0, 20.0, 2.0)) == (0,)


def test_system_that_mostly_waits_keeps_all_samples():
    assert _kept(Sample(10.0, 1.0), Sample(10.0, 0.5)) == (0, 1)


def test_outlier_of_many_samples_is_no_reference():
    steps = [Sample(1e-3, 1e-3)] * 20 + [Sample(1e-3, 2e-3)]
    assert select_clean(steps).dropped == 0


@given(
    st.lists(
        st.builds(Sample, st.floats(1e-6, 1e3), st.floats(0.0, 1e3)),
        min_size=1,
        max_size=30,
    )
)
def test_selection_partitions_the_samples_and_keeps_one(samples):
    selection = select_clean(samples)
    assert sorted((*selection.kept, *selection.reasons)) == list(range(len(samples)))
    assert selection.kept


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
def test_tolerance_outside_its_range_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"tolerance: expected within \(0, 1\)"):
        select_clean([], tolerance=tolerance)


def test_sample_without_duration_is_refused():
    with pytest.raises(ValueError, match=r"sample: expected wall_s > 0 .* got 0"):
        Sample(0.0, 1.0)


def test_measured_runs_the_step_once_and_times_it():
    calls = []
    sample = measured(lambda: calls.append(sum(range(1000))))
    assert len(calls) == 1
    assert sample.wall_s > 0
    assert sample.foreign_s is None


@pytest.mark.parametrize(
    ("before", "after", "wall_s", "expected"),
    [
        (100.0, 125.0, 10.0, 5.0),
        (100.0, 119.5, 10.0, 0.0),  # our ticks are rounded
        (100.0, 101.0, 10.0, None),  # our 20 s were not counted
        (100.0, 125.0, 0.5, None),
        (None, None, 10.0, None),
    ],
)
def test_foreign_cpu_time_is_known_or_none(before, after, wall_s, expected):
    assert foreign_cpu_s(before, after, wall_s, 20.0) == expected
