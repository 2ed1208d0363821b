"""The table of all that is aimed at: what is met, what is missed, and the worst of it.

Figures of one metric with one aim share a row, and so do ratios with one aim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from _markdown import Content, markdown, number

HEADERS = ("result", "what", "aim", "figures", "missed", "worst figure")
RATIO = "ratio"
NAMED = 3  # of the systems that missed


def targets(found: Mapping[str, Content]) -> list[str]:
    """The table's lines.

    Args:
        found: Result files by name.
    """
    lines = [
        [name, *_cells(what, group)]
        for name, content in found.items()
        for what, group in _groups(content)
    ]
    judged = [each for content in found.values() for each in _judged(content)]
    missed = sum(not each["met"] for each in judged)
    return [
        f"Of {len(judged):,} figures with an aim, in {len(lines)} groups, {missed:,} "
        "**miss** it.",
        "",
        *markdown(HEADERS, lines),
    ]


def _judged(content: Content) -> list[Content]:
    entries = [*content["rows"], *content["ratios"]]
    return [each for each in entries if each["target"] is not None]


def _groups(content: Content) -> list[tuple[str, list[Content]]]:
    """What is aimed at, and its figures."""

    def key(entry: Content) -> tuple[str, str]:
        return entry.get("metric", RATIO), _aim(entry)

    return [
        (what, list(group))
        for (what, _), group in groupby(sorted(_judged(content), key=key), key)
    ]


def _cells(what: str, group: Sequence[Content]) -> list[str]:
    missed = [_name(each) for each in group if not each["met"]]
    worst = min(group, key=_room)
    told = ", ".join(missed) if len(missed) <= NAMED else f"{len(missed)} of them"
    return [
        what,
        _aim(group[0]),
        f"{len(group):,}",
        f"**{told}**" if missed else "none",
        f"{_figure(worst)} ({_name(worst)})" if len(group) > 1 else _figure(worst),
    ]


def _name(entry: Content) -> str:
    return str(entry.get("system") or entry["name"])


def _figure(entry: Content) -> str:
    figure = entry[entry["target"]["of"]]
    return "none" if figure is None else number(figure)


def _room(entry: Content) -> float:
    """How far a figure is on the good side of its bound."""
    target = entry["target"]
    figure = entry[target["of"]]
    if figure is None:
        return float("-inf")
    if "at_least" in target:
        return float(figure - target["at_least"])
    return float(target["at_most"] - figure)


def _aim(entry: Content) -> str:
    target = entry["target"]
    side, sign = ("at_least", "≥") if "at_least" in target else ("at_most", "≤")
    unit = f" {entry['unit']}" if "unit" in entry else ""
    of = "" if target["of"] in ("median", "value") else f" ({target['of']})"
    return f"{sign} {number(target[side])}{unit}{of}"
