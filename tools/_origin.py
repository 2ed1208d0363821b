"""Whether a result file may be published: where it comes from, and is it whole.

The file alone is looked at; what changed since is asked of git elsewhere.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _markdown import Content

MIN_REPEATS = 3
REPEATS = "repeats"
_SHORT = 1.0  # s: of less the processors' clocks do not tell what others used
# Of the machine; null where there is none.
MAY_BE_ABSENT = ("gpu", "cuda")
MACHINE = {
    **dict.fromkeys(("cpu", "torch", "python", "os", "compiler", "flags"), str),
    **dict.fromkeys(("cores", "threads"), int),
}
ROW = {
    **dict.fromkeys(("system", "metric", "unit", "values_of"), str),
    **dict.fromkeys(("values", "turns", "samples", "dropped"), list),
    **dict.fromkeys(("repeats", "failed"), int),
}
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "min": min,
    "max": max,
}
RATIO = {
    **dict.fromkeys(("name", "better_than"), str),
    **dict.fromkeys(("value", "min", "max"), float),
    "repeats": int,
}
DROPPED = {"turn": int, "value": float, "why": str}


def complaints(content: Content, command: str) -> Iterator[str]:
    """Say what keeps a result file from being published; nothing: it may be.

    Args:
        content: The file.
        command: The command line of which it must be the result.
    """
    yield from _origin(content, command)
    yield from _fields("machine", content.get("machine"), MACHINE)
    machine = content.get("machine") or {}
    yield from (
        f"machine: expected {name}, got none"
        for name in MAY_BE_ABSENT
        if name not in machine
    )
    for section, check in (("rows", _row), ("ratios", _ratio)):
        entries = content.get(section)
        if not isinstance(entries, list):
            yield f"expected {section}, got {entries}"
            continue
        for entry in entries:
            yield from check(entry)


def _origin(content: Content, command: str) -> Iterator[str]:
    if not re.fullmatch(r"[0-9a-f]{40}", str(content.get("commit"))):
        yield f"expected a commit, got {content.get('commit')}"
    if content.get("dirty") is not False:
        paths = ", ".join(map(str, content.get("changed") or ["no paths"]))
        yield f"expected dirty false, got {content.get('dirty')} ({paths})"
    if content.get("command") != command:
        yield f"expected the command `{command}`, got `{content.get('command')}`"
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(content.get("date"))):
        yield f"expected a date, got {content.get('date')}"
    share, took = content.get("foreign_share"), content.get("took_s", math.inf)
    if not _is(share, float) and not (share is None and took < _SHORT):
        yield f"expected foreign_share, got {share}"
    if content.get("quick") is not False:
        yield f"expected quick false, got {content.get('quick')}"


def _row(row: Content) -> Iterator[str]:
    name = f"{row.get('system')}, {row.get('metric')}"
    problems = list(_fields(name, row, ROW))
    for key in ("foreign_share", "target", "met"):
        if key not in row:
            problems.append(f"{name}: expected {key}, got none")
    if problems:
        yield from problems
        return
    values, counted = row["values"], row["values_of"] == REPEATS
    if row["failed"] or len(values) < (MIN_REPEATS if counted else 1):
        yield (
            f"{name}: expected {MIN_REPEATS} repeats without failure, got "
            f"{row['failed']} failed, {len(values)} clean"
        )
        return
    if row["repeats"] != (len(values) if counted else 1):
        yield f"{name}: expected as many repeats as values, got {row['repeats']}"
    if len(row["turns"]) != len(values) or len(row["samples"]) not in (0, len(values)):
        yield f"{name}: expected a turn and a sample per value, got others"
    for figure, of in FIGURES.items():
        if row.get(figure) != of(values):
            yield f"{name}: expected {figure} {of(values)}, got {row.get(figure)}"
    for each in row["dropped"]:
        yield from _fields(f"{name}, dropped", each, DROPPED)
    yield from _judgement(name, row)


def _ratio(ratio: Content) -> Iterator[str]:
    name = str(ratio.get("name"))
    problems = list(_fields(name, ratio, RATIO))
    for key in ("bound", "target", "met"):
        if key not in ratio:
            problems.append(f"{name}: expected {key}, got none")
    yield from problems or _judgement(name, ratio)


def _judgement(name: str, entry: Content) -> Iterator[str]:
    """A target that is met or missed is said to be so."""
    target = entry["target"]
    if target is None:
        return
    figure = entry[target["of"]]
    if "at_least" in target:
        met = figure >= target["at_least"]
    else:
        met = figure <= target["at_most"]
    if entry["met"] is not met:
        yield f"{name}: expected met {met}, got {entry['met']}"


def _fields(name: str, entry: Any, kinds: dict[str, type]) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{name}: expected fields, got {entry}"
        return
    for key, kind in kinds.items():
        if not _is(entry.get(key), kind):
            yield f"{name}: expected {key}, got {entry.get(key)}"


def _is(value: object, kind: type) -> bool:
    """Whether JSON's value is of a kind; a whole number is a float, too."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
