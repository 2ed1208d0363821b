"""How far from the best cuts: the slowest stage over the slowest that must be.

python benchmarks/partition_quality.py --json benchmarks/results/partition_quality.json

Rows of layers from seeded generators and three transformers, unfrozen and with a
frozen prefix, are cut by our exact solver, by the paper's greedy rule on parameters
and on times, by Block Partition and into equal numbers of layers. The optimum comes
from a table over all cuts that shares no code with the solver. Nothing is timed:
equal seeds give equal figures on any machine. The status is 1 if ours misses an
optimum. METRICS.md derives the columns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

from harness.common import (
    Ratio,
    Row,
    Target,
    add_common_arguments,
    begin,
    compared,
    write_json,
)
from harness.text import text_table
from planner.layer_rows import TIMES, LayerRow, model_rows, random_row
from planner.partitioners import OURS, PARTITIONERS, optimum

METRIC = "bottleneck_over_optimum"


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=24)
    args = parser.parse_args(arguments)
    if args.quick:
        args.repeats = min(args.repeats, 5)
    return args


def instances(args: argparse.Namespace) -> list[LayerRow]:
    """Return the rows to cut: ``--repeats`` of each kind, and the models."""
    seeds = args.seeds or range(args.seed, args.seed + args.repeats)
    return [random_row(kind, seed) for kind in TIMES for seed in seeds] + model_rows()


def quality(rows: Sequence[LayerRow]) -> list[Row]:
    """Return each partitioner's bottlenecks over the optima, row by row."""
    best = [optimum(row) for row in rows]
    return [
        Row(
            name,
            METRIC,
            "ratio",
            tuple(
                row.largest_stage(cut(row)) / least
                for row, least in zip(rows, best, strict=True)
            ),
            values_of="instances",
            target=Target(1.0, of="max") if name == OURS else None,
        )
        for name, cut in PARTITIONERS.items()
    ]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return geometric mean, 90 % quantile (nearest rank), largest, share at 1."""
    ascending = sorted(values)
    return {
        "geomean": statistics.geometric_mean(ascending),
        "p90": ascending[math.ceil(0.9 * len(ascending)) - 1],
        "max": ascending[-1],
        "optimal": sum(value == 1 for value in ascending) / len(ascending),
    }


def by_kind(rows: Sequence[LayerRow], row: Row) -> dict[str, float]:
    """Return the geometric mean of each kind of instance."""
    values: dict[str, list[float]] = {}
    for instance, value in zip(rows, row.values, strict=True):
        values.setdefault(instance.kind, []).append(value)
    return {kind: statistics.geometric_mean(found) for kind, found in values.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    rows = instances(args)
    found = quality(rows)
    summaries = {row.system: summary(row.values) for row in found}
    lines = [
        [name, *(f"{s[key]:.3f}" for key in ("geomean", "p90", "max", "optimal"))]
        for name, s in summaries.items()
    ]
    print(f"slowest stage over the optimum, {len(rows)} rows of layers")
    print(text_table(["method", "geomean", "p90", "max", "share optimal"], lines))
    by_name = {row.system: row for row in found}
    ratios: list[Ratio] = []
    for name, row in by_name.items():
        if name != OURS:
            ratios += compared(
                f"{name} / ours",
                row,
                by_name[OURS],
                better_than=name,
                quick=args.quick,
            )
    if args.json is not None:
        write_json(
            args.json,
            "partition_quality",
            found,
            ratios,
            start=start,
            quick=args.quick,
            instances=len(rows),
            summary=summaries,
            by_kind={row.system: by_kind(rows, row) for row in found},
            seeds=args.seeds or [args.seed, args.seed + args.repeats - 1],
        )
    return 0 if summaries[OURS]["max"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
