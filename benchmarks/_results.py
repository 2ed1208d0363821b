"""Rows of figures, the ratios between them, and the JSON that holds both."""

from __future__ import annotations

import datetime
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _machine import machine
from _text import text_table

MIN_REPEATS = 3


class RatioRefused(ValueError):
    """Two rows that must not be compared: a failed repeat, or too few clean ones."""


@dataclass(frozen=True)
class Row:
    """One metric of one system.

    Attributes:
        system: Its name.
        metric: What was measured.
        unit: Its unit.
        values: One per clean repeat, in the order of the repeats.
        turns: The number of each value's repeat; empty for 0, 1, 2, ...
        dropped: Number of repeats left out because other programs disturbed them.
        failed: Number of repeats that failed.
        foreign_share: Share of the machine's CPU time that went to others, median
            over the clean repeats; None where unknown.
    """

    system: str
    metric: str
    unit: str
    values: tuple[float, ...]
    turns: tuple[int, ...] = ()
    dropped: int = 0
    failed: int = 0
    foreign_share: float | None = None

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
    """

    name: str
    value: float
    min: float
    max: float
    repeats: int
    better_than: str


def ratio(
    name: str, over: Row, under: Row, *, better_than: str, quick: bool = False
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
                f"and {row.dropped} disturbed"
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
    return Ratio(name, middle, min(pairs), max(pairs), len(pairs), better_than)


def compared(
    name: str, over: Row, under: Row, *, better_than: str, quick: bool = False
) -> list[Ratio]:
    """Return `ratio` of the same arguments; if it is refused, print why and nothing."""
    try:
        return [ratio(name, over, under, better_than=better_than, quick=quick)]
    except RatioRefused as refusal:
        print(f"refused: {refusal}")
        return []


def write_json(
    path: Path,
    name: str,
    rows: Sequence[Row],
    ratios: Sequence[Ratio],
    *,
    quick: bool,
    **extra: object,
) -> None:
    """Write a result file, whole or not at all.

    Args:
        path: Where to; its folder is created.
        name: The benchmark, by which tables name it.
        rows: Medians; a row without values gets null ones.
        ratios: Paired ratios.
        quick: Marks figures that are not for publication; so do too few repeats
            behind a ratio.
        extra: Further sections, by name.
    """
    content: dict[str, object] = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "quick": quick or any(ratio.repeats < MIN_REPEATS for ratio in ratios),
        "machine": machine(),
        "rows": [_row_content(row) for row in rows],
        "ratios": [asdict(ratio) for ratio in ratios],
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
    return {
        "system": row.system,
        "metric": row.metric,
        "unit": row.unit,
        "median": row.median if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "repeats": len(values),
        "values": values,
        "dropped": row.dropped,
        "failed": row.failed,
        "foreign_share": row.foreign_share,
    }
