"""What the engine itself costs: microseconds per training step above a plain loop.

python benchmarks/engine_overhead.py --json benchmarks/results/engine_overhead.json

Twelve tiny layers, one thread a process: the engine (K = 1, M = 1) above a plain loop
in one process, above plain DDP in two, and, with everything frozen and cached but the
head, above a loop that indexes a tensor and trains the head. The systems take turns
within the same processes; a plain loop's twin tells what is noise. For the cases of one
process also where the time goes, by part of the engine. METRICS.md derives the columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.child import RunFailed
from harness.common import Row, Target, begin, write_json
from harness.forked import fork_server
from harness.text import text_table
from training.engine_steps import (
    AGAIN,
    ALONE,
    CACHED,
    CASES,
    ENGINE,
    PLAIN,
    REPLICAS,
    SYSTEMS,
    Case,
    Effort,
    Measured,
    measure_case,
)
from training.step_parts import PARTS

ABOVE, ABOVE_MEANS, NOISE = "above", "above, means", "again above"
METRICS = (*SYSTEMS, ABOVE, ABOVE_MEANS, NOISE)
UNIT = "us"
MOST_US = {ALONE.name: 200.0, REPLICAS.name: 250.0, CACHED.name: 300.0}
# Short turns: what else the machine does changes slower than the systems take turns.
PUBLISHED = Effort(rounds=342, steps=6, warm=30, profiled=300)
QUICK = Effort(rounds=12, steps=10, warm=10, profiled=40)
TIMEOUT_S = {False: 110.0, True: 40.0}  # of a case; quick or not


def rows_of(case: Case, found: Measured | None) -> list[Row]:
    """Return a case's figures, a value per round; none of a case that failed."""

    def above(times: Mapping[str, Sequence[float]], system: str) -> tuple[float, ...]:
        pairs = zip(times[system], times[PLAIN], strict=True)
        return tuple(one - other for one, other in pairs)

    values: dict[str, tuple[float, ...]] = dict.fromkeys(METRICS, ())
    if found is not None:
        values = {system: tuple(found.medians[system]) for system in SYSTEMS}
        values[ABOVE] = above(found.medians, ENGINE)
        values[ABOVE_MEANS] = above(found.means, ENGINE)
        values[NOISE] = above(found.medians, AGAIN)
    aims = {ABOVE: Target(MOST_US[case.name])}
    return [
        Row(
            case.name,
            metric,
            UNIT,
            values[metric],
            failed=int(found is None),
            target=aims.get(metric),
        )
        for metric in METRICS
    ]


def told(row: Row) -> str:
    """Return a row's median and range, and whether it misses its target."""
    if not row.values:
        return "failed"
    cell = f"{row.median:.0f} ({min(row.values):.0f} to {max(row.values):.0f})"
    if row.target is None:
        return cell
    met = row.target.judged({"median": row.median})["met"]
    return f"{cell}, aim {row.target.bound:.0f}{'' if met else ' missed'}"


def print_steps(rows: Sequence[Row]) -> None:
    """Print a line per case."""
    cells = {(row.system, row.metric): told(row) for row in rows}
    cases = dict.fromkeys(row.system for row in rows)
    lines = [[case, *(cells[case, metric] for metric in METRICS)] for case in cases]
    print(text_table([f"{UNIT} per step", *METRICS], lines))


def print_parts(case: Case, found: Measured) -> None:
    """Print the profile of a case: own time and calls of a step, by part."""
    if not found.parts:
        return
    nothing = {"us": 0.0, "calls": 0.0, "c_calls": 0.0}
    lines = []
    total = dict.fromkeys((ENGINE, PLAIN), 0.0)
    calls = dict.fromkeys((ENGINE, PLAIN), 0.0)
    for part in PARTS:
        own, plain = (found.parts[s].get(part, nothing) for s in (ENGINE, PLAIN))
        cells = [own["us"], plain["us"], own["us"] - plain["us"]]
        cells += [own["calls"], own["calls"] - plain["calls"], own["c_calls"]]
        lines.append([part, *(f"{cell:.1f}" for cell in cells)])
        for system, each in ((ENGINE, own), (PLAIN, plain)):
            total[system] += each["us"]
            calls[system] += each["calls"]
    cells = [total[ENGINE], total[PLAIN], total[ENGINE] - total[PLAIN]]
    cells += [calls[ENGINE], calls[ENGINE] - calls[PLAIN]]
    lines.append(["all", *(f"{cell:.1f}" for cell in cells), ""])
    headers = [ENGINE, PLAIN, "above", "calls", "above", "calls of C"]
    print(f"\n{case.name}, {UNIT} per step under the profiler")
    print(text_table(["part", *headers], lines))
    files = found.stack["files"]
    print(
        f"at the first layer: {found.stack['frames']} frames in {len(files)} files of "
        "the engine"
    )


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="<= 60 s; not for publication")
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start, began = begin(), time.monotonic()
    effort = QUICK if args.quick else PUBLISHED
    fork_server("training.engine_steps")
    found: dict[str, Measured] = {}
    rows: list[Row] = []
    for name in args.cases:
        try:
            found[name] = measure_case(
                CASES[name], effort, timeout_s=TIMEOUT_S[args.quick]
            )
        except RunFailed as failure:
            print(f"failed: {failure}", file=sys.stderr)
        rows += rows_of(CASES[name], found.get(name))
    print_steps(rows)
    for name, each in found.items():
        print_parts(CASES[name], each)
    print(f"\n{time.monotonic() - began:.0f} s")
    if args.json is not None:
        write_json(
            args.json,
            "engine_overhead",
            rows,
            [],
            start=start,
            quick=args.quick,
            rounds=effort.rounds,
            steps=effort.steps,
            parts={name: each.parts for name, each in found.items()},
            stack={name: each.stack for name, each in found.items()},
        )
    return int(len(found) < len(args.cases))


if __name__ == "__main__":
    sys.exit(main())
