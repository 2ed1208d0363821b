"""What a transformation costs: the change of groups, and the whole pause by phase.

python benchmarks/transition_time.py --json benchmarks/results/transition_time.json

First the change of the active group alone, without a model, at 2, 4 and 8 processes:
protocol, group, first collective; with a new group each time and between groups that
are kept. Then the hand-over of a state alone, and the pause of real transformations,
down and up, of the demo's model, also with plans that are prepared while training goes
on, and of a model of 100 M parameters: by phase, in steps of the unfrozen plan, with
and without the moved bytes. The source's transformations take 10 to 40 s. Columns:
METRICS.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.common import Row, Target, begin, write_json
from harness.forked import fork_server
from harness.results import spread_table
from transformations.move_times import move_rows
from transformations.pause_runs import (
    AHEAD,
    DEMO,
    LARGE,
    TINY,
    PauseRun,
    by_name,
    run_load,
)
from transformations.switch_times import PARTS, switch_times

SOURCE_S = (10.0, 40.0)
TARGETS_MS = {("new, 8 processes", "p50"): 50.0}
MOST_STEPS = 1.0  # of the pause without the moved bytes
CHANGES = "changes of one run"
WORLDS = (2, 4, 8)
MOVES = ((DEMO, 2), (DEMO, 4), (LARGE, 2))  # models, and processes that hold them


def switch_rows(worlds: Sequence[int], changes: int, repeats: int) -> list[Row]:
    """Time the change of groups; a repeat is a new set of processes."""
    rows = []
    for world in worlds:
        for kind, cached in (("new", False), ("kept", True)):
            system = f"{kind}, {world} processes"
            found: dict[str, list[float]] = {}
            for _ in range(repeats):
                times = switch_times(world, changes, cached=cached)
                for name, value in _quantiles(times).items():
                    found.setdefault(name, []).append(1e3 * value)
            for name, values in found.items():
                most = TARGETS_MS.get((system, name))
                aim = None if most is None else Target(most)
                rows.append(Row(system, name, "ms", tuple(values), target=aim))
    return rows


def _quantiles(times: Sequence[Sequence[float]]) -> dict[str, float]:
    whole = sorted(sum(parts) for parts in times)
    parts = {
        name: statistics.median(t[i] for t in times) for i, name in enumerate(PARTS)
    }
    p90 = whole[min(len(whole) - 1, round(0.9 * len(whole)))]
    return {"p50": statistics.median(whole), "p90": p90, **parts}


def pause_rows(name: str, run: PauseRun) -> list[Row]:
    """Return pause, phases and steps of each kind of change; repeats are changes."""
    rows: list[Row] = []
    for kind, changes in by_name(run.changes).items():
        system = f"{name}, {kind}"
        phases = list(dict.fromkeys(p for c in changes for p in c.phases))
        moved = tuple(1e3 * c.phases.get("move", 0.0) for c in changes)
        pauses = tuple(1e3 * c.pause_s for c in changes)
        steps = tuple(c.pause_s / run.step_s for c in changes)
        still = tuple(
            (c.pause_s - c.phases.get("move", 0.0)) / run.step_s for c in changes
        )
        whole = tuple(1e3 * c.whole_s for c in changes)
        predicted = tuple(1e3 * c.predicted_s for c in changes)
        rows += [
            Row(system, "pause", "ms", pauses),
            Row(system, "move", "ms", moved),
            Row(system, "with its first step", "ms", whole),
            Row(system, "predicted", "ms", predicted),
        ]
        rows += [
            Row(
                system,
                phase,
                "ms",
                tuple(1e3 * c.phases[phase] for c in changes if phase in c.phases),
            )
            for phase in phases
            if phase != "move"
        ]
        rows += [
            Row(system, "pause in steps", "steps", steps),
            Row(
                system,
                "without moved bytes",
                "steps",
                still,
                target=Target(MOST_STEPS),
            ),
        ]
    return [dataclasses.replace(row, values_of=CHANGES) for row in rows]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="2 processes, a tiny model")
    add("--changes", type=int, default=40, help="of groups, per repeat")
    add("--moves", type=int, default=10, help="of the state of a model")
    add("--repeats", type=int, default=3, help="sets of processes; cycles of a model")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server("transformations.switch_times", "transformations.move_times")
    worlds, loads = ((2,), (TINY,)) if args.quick else (WORLDS, (DEMO, AHEAD, LARGE))
    rows = switch_rows(worlds, 5 if args.quick else args.changes, args.repeats)
    for load, world in MOVES if not args.quick else ((TINY, 2),):
        rows += move_rows(load, world, 2 if args.quick else args.moves)
    runs: Mapping[str, PauseRun] = {
        load.name: run_load(load, args.repeats) for load in loads
    }
    for name, run in runs.items():
        rows += pause_rows(name, run)
    print(spread_table(["what", "part"], rows))
    for name, run in runs.items():
        print(f"{name}: {run.parameters} parameters, step {1e3 * run.step_s:.1f} ms")
    print(f"source: {SOURCE_S[0]:g} to {SOURCE_S[1]:g} s")
    if args.json is not None:
        write_json(
            args.json,
            "transition_time",
            rows,
            [],
            start=start,
            quick=args.quick,
            models={
                name: {"parameters": run.parameters, "step_ms": 1e3 * run.step_s}
                for name, run in runs.items()
            },
            source_s=list(SOURCE_S),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
