"""Figures of a result file as Markdown tables; what all kinds of tables share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A result file as benchmarks/harness/results.py writes it.
Content = dict[str, Any]


def ratios(content: Content) -> list[str]:
    """Each ratio with its range over the paired repeats."""
    return markdown(
        ["ratio", "value", "min to max", "repeats"],
        [
            [
                each["name"],
                marked(speedup(each), each),
                f"{each['min']:.2f} to {each['max']:.2f}",
                str(each["repeats"]),
            ]
            for each in content["ratios"]
        ],
    )


def bounded(content: Content) -> list[str]:
    """Each ratio with its range and what bounds it."""
    lines = []
    for each in content["ratios"]:
        bound = each["bound"]
        told = "-" if bound is None else f"{bound:.2f}"
        lines.append([each["name"], value_and_range(each), told])
    return markdown(["ratio", "value", "bound"], lines)


def speedup(ratio: Content) -> str:
    """A ratio's value; one above its bound is no merit, and says so."""
    value, bound = ratio["value"], ratio["bound"]
    if bound is None or value <= bound:
        return f"{value:.2f}"
    return f"{value:.2f} (above its bound {bound:.2f}: measurement at fault)"


def with_range(ratio: Content) -> str:
    """A ratio's value and its range over the paired repeats."""
    return f"{speedup(ratio)} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def rows(content: Content) -> list[str]:
    """Systems by metrics: median, and the range in brackets."""
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    systems = list(dict.fromkeys(system for system, _ in cells))
    units = {row["metric"]: row["unit"] for row in content["rows"]}
    return markdown(
        ["system", *(f"{metric} ({unit})" for metric, unit in units.items())],
        [
            [system, *(median_and_range(cells.get((system, m))) for m in units)]
            for system in systems
        ],
    )


def markdown(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return [f"| {' | '.join(line)} |" for line in (headers, rule, *lines)]


def median_and_range(row: Content | None) -> str:
    """A row's cell; a dash for a combination that was not measured."""
    if row is None:
        return "-"
    middle, low, high = (number(row[key]) for key in ("median", "min", "max"))
    told = middle if low == middle == high else f"{middle} ({low} to {high})"
    return marked(told, row)


def value_and_range(ratio: Content) -> str:
    """The cell of a ratio with its range and, if it has a target, the verdict."""
    return marked(with_range(ratio), ratio)


def marked(cell: str, judged: Content) -> str:
    """The cell of a row or ratio, which says so if the target was missed."""
    return f"{cell} **missed**" if judged.get("met") is False else cell


def number(value: float) -> str:
    """Four digits, without an exponent for large values."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
