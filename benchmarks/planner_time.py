"""How long planning takes: solvers alone, sweeps over K and M, whole searches.

python benchmarks/planner_time.py --json benchmarks/results/planner_time.json

Planning is one thread that waits for nothing, so its processor time is taken: what
other programs do on a shared machine hardly shows. The input is random with a fixed
seed and includes memory limits; a call takes Python lists and returns Python values,
and that is in its time. Searches simulate their best candidates. METRICS.md lists the
cases; the ratios say how the time grows with layers and devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from harness.common import (
    Ratio,
    Repeat,
    Row,
    Target,
    add_common_arguments,
    begin,
    compared,
    interleave,
    measured,
    write_json,
)
from harness.text import text_table
from planner.cases import TARGETS_MS, Case, cases

METRIC, UNIT = "processor_ms", "ms"
# Short calls: how busy they keep a core says nothing about a disturbance.
TOLERANCE = 0.9
# Above the line, below it: how the time grows.
GROWTH = (
    ("min-max, L=10000 K=64", "min-max, L=1000 K=64"),
    ("min-max, L=10000 K=512", "min-max, L=10000 K=64"),
    ("search, L=200 K=1..64", "search, L=50 K=1..50"),
    ("search, L=1000 K=1..64", "search, L=200 K=1..64"),
    ("search, L=50, 1000 devices", "search, L=50, 16 devices"),
    ("search, L=50, 10000 devices", "search, L=50, 16 devices"),
)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=7)
    add = parser.add_argument
    add("--calls", type=int, default=5, help="of one repeat; their median counts")
    args = parser.parse_args(arguments)
    if args.quick:
        args.repeats, args.calls = min(args.repeats, 3), 1
    return args


def runner(found: Mapping[str, Case], calls: int) -> Callable[[str, int], Repeat]:
    """Return what times one case: the median of several calls."""

    def run(name: str, turn: int) -> Repeat:
        times: list[float] = []

        def repeat() -> None:
            for _ in range(calls):
                start = time.thread_time()
                found[name]()
                times.append(time.thread_time() - start)

        gc.disable()
        try:
            sample = measured(repeat)
        finally:
            gc.enable()
        return Repeat(sample, {METRIC: 1e3 * statistics.median(times)})

    return run


def growth(rows: Mapping[str, Row], *, quick: bool) -> list[Ratio]:
    """Return the ratios of ``GROWTH`` whose cases were timed."""
    ratios: list[Ratio] = []
    for over, under in GROWTH:
        if over in rows and under in rows:
            ratios += compared(
                f"{over} / {under}",
                rows[over],
                rows[under],
                better_than=over,
                quick=quick,
            )
    return ratios


def judged(row: Row) -> Row:
    """Return a case's row with its target, if it has one."""
    most = TARGETS_MS.get(row.system)
    return row if most is None else dataclasses.replace(row, target=Target(most))


def table(rows: Mapping[str, Row]) -> str:
    """Return the medians alongside what they should stay within."""
    lines = []
    for name, row in rows.items():
        target = TARGETS_MS.get(name)
        spread = f"{min(row.values):.2f} .. {max(row.values):.2f}"
        wanted = "" if target is None else f"{target:g}"
        lines.append([name, f"{row.median:.2f}", spread, wanted])
    return text_table(["case", "ms", "range", "at most"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    found = cases(args.seed, quick=args.quick)
    series = interleave(
        list(found),
        runner(found, args.calls),
        repeats=args.repeats,
        tolerance=TOLERANCE,
    )
    rows = {name: judged(each.row(METRIC, UNIT)) for name, each in series.items()}
    print(table(rows))
    ratios = growth(rows, quick=args.quick)
    for each in ratios:
        print(f"{each.name}: {each.value:.2f} ({each.min:.2f} to {each.max:.2f})")
    if args.json is not None:
        write_json(
            args.json,
            "planner_time",
            list(rows.values()),
            ratios,
            start=start,
            quick=args.quick,
            calls=args.calls,
            seed=args.seed,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
