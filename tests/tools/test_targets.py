"""The table of aims counts every figure that has one and hides no miss."""

import _targets


def row(system, figure, met, bound=10.0, side="at_most", metric="time", unit="us"):
    return {
        "system": system,
        "metric": metric,
        "unit": unit,
        "median": figure,
        "max": figure,
        "target": {side: bound, "of": "median"},
        "met": met,
    }


def content(rows, ratios=()):
    free = {"system": "free", "metric": "time", "unit": "us", "target": None}
    return {"rows": [free, *rows], "ratios": list(ratios)}


def test_figures_of_one_metric_with_one_aim_share_a_row():
    ratio = {
        "name": "a / b",
        "value": 1.5,
        "target": {"at_least": 2.0, "of": "value"},
        "met": False,
    }
    found = {
        "speed": content(
            [row("a", 9.0, True), row("b", 12.0, False), row("c", 1.0, True)], [ratio]
        ),
        "size": content([row("a", 1.0, True, metric="bytes", unit="B")]),
    }
    first, _, *lines = _targets.targets(found)
    assert first == "Of 5 figures with an aim, in 3 groups, 2 **miss** it."
    assert lines[2:] == [
        "| speed | ratio | ≥ 2 | 1 | **a / b** | 1.5 |",
        "| speed | time | ≤ 10 us | 3 | **b** | 12 (b) |",
        "| size | bytes | ≤ 10 B | 1 | none | 1 |",
    ]


def test_many_misses_are_counted_and_the_worst_is_named():
    rows = [
        row(name, 1.0 + place, False, 5.0, "at_least")
        for place, name in enumerate("dcba")
    ]
    (line,) = _targets.targets({"speed": content(rows)})[-1:]
    assert line == "| speed | time | ≥ 5 us | 4 | **4 of them** | 1 (d) |"


def test_what_was_not_measured_is_the_worst():
    rows = [row("a", 99.0, False), row("b", None, False)]
    (line,) = _targets.targets({"speed": content(rows)})[-1:]
    assert line.endswith("| **a, b** | none (b) |")


def test_aim_of_another_figure_than_the_median_says_which():
    slow = row("a", 120.0, False, 100.0)
    slow["target"]["of"] = "max"
    (line,) = _targets.targets({"speed": content([slow])})[-1:]
    assert line == "| speed | time | ≤ 100 us (max) | 1 | **a** | 120 |"
