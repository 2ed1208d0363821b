"""Rows of figures, the ratios between them, and the JSON that holds both."""

from __future__ import annotations

import datetime
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine import machine
from harness.provenance import Start, provenance
from harness.text import text_table
from harness.timing import Sample

MIN_REPEATS = 3
REPEATS = "repeats"


class RatioRefused(ValueError):
    """Two rows that must not be compared: a failed repeat, or too few clean ones."""


@dataclass(frozen=True)
class Target:
    """What a figure is to reach.

    Attributes:
        bound: The figure that is just good enough.
        at_least: Whether larger figures are better; else smaller ones are.
        of: Which figure of a row: ``"median"``, ``"min"`` or ``"max"``; of a ratio:
            ``"value"``, ``"min"`` or ``"max"``.
    """

    bound: float
    at_least: bool = False
    of: str = "median"

    def judged(self, figures: Mapping[str, Any]) -> dict[str, object]:
        """Return ``target`` and ``met`` of a row or ratio.

        Args:
            figures: By name; None where nothing was measured, which meets nothing.
        """
        figure = figures[self.of]
        side = "at_least" if self.at_least else "at_most"
        reached = figure is not None and (
            figure >= self.bound if self.at_least else figure <= self.bound
        )
        return {"target": {side: self.bound, "of": self.of}, "met": reached}


@dataclass(frozen=True)
class Dropped:
    """A value that does not count.

    Attributes:
        turn: The number of its repeat.
        value: What was measured.
        why: Why it does not count.
        sample: How its repeat was timed; None where it was not.
    """

    turn: int
    value: float
    why: str
    sample: Sample | None = None


@dataclass(frozen=True)
class Row:
    """One metric of one system.

    Attributes:
        system: Its name.
        metric: What was measured.
        unit: Its unit.
        values: One per clean repeat, in the order of the repeats.
        turns: The number of each value's repeat; empty for 0, 1, 2, ...
        samples: How each value's repeat was timed; empty where it was not.
        dropped: What was measured in the repeats that do not count.
        failed: Number of repeats that failed.
        foreign_share: Share of the machine's CPU time that went to others, median
            over the clean repeats; None where unknown.
        values_of: What the values are one of each of; ``"ranks of one run"``, say, is
            one repeat.
        target: What the figures are to reach; None: nothing.
    """

    system: str
    metric: str
    unit: str
    values: tuple[float, ...]
    turns: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    failed: int = 0
    foreign_share: float | None = None
    values_of: str = REPEATS
    target: Target | None = None

    def by_turn(self) -> dict[int, float]:
        """Return the value of each repeat by its number."""
        turns = self.turns or range(len(self.values))
        return dict(zip(turns, self.values, strict=True))

    @property
    def median(self) -> float:
        """Median of the values; StatisticsError if there is none."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.values) - min(self.values)) / self.median


@dataclass(frozen=True)
class Ratio:
    """Median and range of the ratios of paired repeats.

    Attributes:
        name: What is compared.
        value: Median over the pairs.
        min: Smallest pair.
        max: Largest pair.
        repeats: Number of pairs.
        better_than: The system that serves as the measure.
        bound: What the ratio can not exceed; None where nothing is known.
        target: What it is to reach; None: nothing.
    """

    name: str
    value: float
    min: float
    max: float
    repeats: int
    better_than: str
    bound: float | None = None
    target: Target | None = None

    @property
    def above_bound(self) -> bool:
        """Whether the ratio can not be: then the measurement is at fault."""
        return self.bound is not None and self.value > self.bound


def ratio(
    name: str,
    over: Row,
    under: Row,
    *,
    better_than: str,
    quick: bool = False,
    bound: float | None = None,
    target: Target | None = None,
) -> Ratio:
    """Compare two rows of one ``interleave``, repeat by repeat.

    Repeats of the same number are pairs. A speed-up from
    times has the slower system above the line.

    Args:
        name: What is compared.
        over: Above the line.
        under: Below the line; same unit.
        better_than: The system that serves as the measure.
        quick: One clean repeat is enough; such a result is not for publication.
        bound: What the ratio can not exceed.
        target: What it is to reach.

    Raises:
        RatioRefused: failed repeats, too few clean ones or pairs of them, or a value
            that is not > 0.
        ValueError: the units differ.
    """
    if over.unit != under.unit:
        raise ValueError(
            f"ratio {name}: expected equal units, got {over.unit} and {under.unit}"
        )
    needed = 1 if quick else MIN_REPEATS
    for row in (over, under):
        what = f"ratio {name}: {row.system}, {row.metric}: expected"
        if row.failed:
            raise RatioRefused(f"{what} no failed repeat, got {row.failed}")
        if len(row.values) < needed:
            raise RatioRefused(
                f"{what} >= {needed} clean repeats, got {len(row.values)} "
                f"and {len(row.dropped)} disturbed"
            )
        if not min(row.values) > 0:
            raise RatioRefused(f"{what} values > 0, got {min(row.values)}")
    upper, lower = over.by_turn(), under.by_turn()
    pairs = [upper[turn] / lower[turn] for turn in sorted(upper.keys() & lower.keys())]
    if len(pairs) < needed:
        raise RatioRefused(
            f"ratio {name}: expected >= {needed} pairs of clean repeats, got "
            f"{len(pairs)}"
        )
    middle = statistics.median(pairs)
    return Ratio(
        name, middle, min(pairs), max(pairs), len(pairs), better_than, bound, target
    )


def compared(
    name: str,
    over: Row,
    under: Row,
    *,
    better_than: str,
    quick: bool = False,
    bound: float | None = None,
    target: Target | None = None,
) -> list[Ratio]:
    """Return `ratio` of the same arguments; if it is refused, print why and nothing."""
    try:
        found = ratio(
            name,
            over,
            under,
            better_than=better_than,
            quick=quick,
            bound=bound,
            target=target,
        )
    except RatioRefused as refusal:
        print(f"refused: {refusal}")
        return []
    return [found]


def write_json(
    path: Path,
    name: str,
    rows: Sequence[Row],
    ratios: Sequence[Ratio],
    *,
    start: Start,
    quick: bool,
    **extra: object,
) -> None:
    """Write a result file, whole or not at all.

    Args:
        path: Where to; its folder is created.
        name: The benchmark, by which tables name it.
        rows: Medians; a row without values gets null ones.
        ratios: Paired ratios.
        start: What ``_provenance.begin`` returned before the first measurement.
        quick: Marks figures that are not for publication; so do too few repeats
            behind a ratio.
        extra: Further sections, by name.
    """
    content: dict[str, object] = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        **provenance(start),
        "quick": quick or any(ratio.repeats < MIN_REPEATS for ratio in ratios),
        "machine": machine(),
        "rows": [_row_content(row) for row in rows],
        "ratios": [_ratio_content(ratio) for ratio in ratios],
    }
    if taken := sorted(content.keys() & extra.keys()):
        raise ValueError(f"extra sections: expected new names, got {taken}")
    text = json.dumps({**content, **extra}, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)


def spread_table(headers: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a line per row: system, metric, median, range, number of repeats."""
    lines = [
        [
            row.system,
            row.metric,
            f"{row.median:.4g} {row.unit}",
            f"{min(row.values):.4g} .. {max(row.values):.4g}",
            str(len(row.values)),
        ]
        for row in rows
    ]
    return text_table([*headers, "median", "range", "repeats"], lines)


def _row_content(row: Row) -> dict[str, object]:
    values = list(row.values)
    content = {
        "system": row.system,
        "metric": row.metric,
        "unit": row.unit,
        "median": row.median if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "repeats": len(values) if row.values_of == REPEATS else min(1, len(values)),
        "values_of": row.values_of,
        "values": values,
        "turns": list(row.by_turn()),
        "samples": [asdict(sample) for sample in row.samples],
        "dropped": [asdict(each) for each in row.dropped],
        "failed": row.failed,
        "foreign_share": row.foreign_share,
    }
    return {**content, **_judged(row.target, content)}


def _ratio_content(ratio: Ratio) -> dict[str, object]:
    content = asdict(ratio)
    return {**content, **_judged(ratio.target, content)}


def _judged(target: Target | None, figures: Mapping[str, Any]) -> dict[str, object]:
    return target.judged(figures) if target else {"target": None, "met": None}
