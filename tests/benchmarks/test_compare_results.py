"""Two result files of one benchmark, figure by figure."""

import pytest

from compare_results import differences


def content(ratio, *medians, name="speed"):
    return {
        "name": name,
        "ratios": [{"name": "a / b", "value": ratio}],
        "rows": [
            {"system": system, "metric": "wall time", "unit": "s", "median": median}
            for system, median in zip("ab", medians, strict=False)
        ],
    }


def test_each_common_figure_is_compared_with_the_first():
    lines = differences(content(2.0, 10.0, 20.0), content(2.1, 9.0))
    assert lines == [
        ["a / b", "2", "2.1", "+5.0 %"],
        ["a, wall time (s)", "10", "9", "-10.0 %"],
    ]


def test_rows_without_a_median_and_zeros_are_left_out_or_marked():
    lines = differences(content(0.0, None), content(1.0, 3.0))
    assert lines == [["a / b", "0", "1", "-"]]


def test_results_of_two_benchmarks_are_refused():
    with pytest.raises(ValueError, match="expected one benchmark, got speed and other"):
        differences(content(1.0), content(1.0, name="other"))


def test_results_without_a_common_figure_are_refused():
    empty = {"name": "speed", "ratios": [], "rows": []}
    with pytest.raises(ValueError, match="expected common figures, got none"):
        differences(content(1.0), empty)
