"""Tables of the planner's benchmarks."""

from __future__ import annotations

from _markdown import Content, markdown, median_and_range, number

ABSENT = "-"


def quality(content: Content) -> list[str]:
    """Each method's slowest stages over the smallest possible ones."""
    lines = [
        [
            method,
            *(f"{found[key]:.3f}" for key in ("geomean", "p90", "max")),
            f"{found['optimal']:.0%}",
        ]
        for method, found in content["summary"].items()
    ]
    return markdown(["method", "geomean", "p90", "max", "optimal"], lines)


def plan_times(content: Content) -> list[str]:
    """Milliseconds of each case, alongside what it should stay within."""
    lines = []
    for row in content["rows"]:
        target = row["target"]
        wanted = ABSENT if target is None else number(target["at_most"])
        lines.append([row["system"], median_and_range(row), wanted])
    return markdown(["case", "ms", "at most"], lines)
