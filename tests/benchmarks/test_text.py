"""Plain-text tables and charts."""

import pytest

from harness.text import bar_chart, text_table


def test_table_columns_are_aligned():
    table = text_table(["system", "s"], [["full", "9.5"], ["static-pipe", "30.1"]])
    assert table.splitlines() == [
        "system          s",
        "-----------  ----",
        "full          9.5",
        "static-pipe  30.1",
    ]


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match=r"row: expected 2 cells, got \['x'\]"):
        text_table(["system", "s"], [["x"]])


def test_bars_are_in_proportion_to_the_largest():
    chart = bar_chart([("epoch 0", 50.0), ("epoch 10", 100.0)], unit="/s", width=8)
    assert chart.splitlines() == [
        "epoch 0  |####     50 /s",
        "epoch 10 |######## 100 /s",
    ]
    assert chart.isascii()


def test_bars_of_nothing_are_empty():
    assert bar_chart([]) == ""
    assert bar_chart([("a", 0.0)], width=4) == "a |     0"


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_bar_refuses_what_has_no_length(value):
    with pytest.raises(ValueError, match="bar a: expected a value >= 0"):
        bar_chart([("a", value)])
