"""What freezing saves in seconds: whole runs against the best static plan.

python benchmarks/freezing_time.py --json benchmarks/results/freezing_time.json

The tasks of `freezing.py`, each trained on CPU slots by the engine as its planner
likes: unfrozen, which is the best static plan, and under each policy. Wall time is that
of the whole run, from opening the engine to closing it, with its profile, its changes
of plan and one evaluation at the end. Runs are made in turn, round after round; each
round has a seed of its own. A ratio is bounded by that of the counted work.

**Aim**: `Guarded` is nowhere slower than the best static plan by more than 3 %.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freezing import DIGITS, UNFROZEN
from harness.common import (
    Ratio,
    Repeat,
    Row,
    Series,
    Target,
    add_common_arguments,
    begin,
    compared,
    run_child,
    seeds_of,
    write_json,
)
from harness.rounds import NO_LIMITS, run_rounds
from harness.text import text_table
from real_models import ROOT, unpack_model
from training.work import work_of

WORKER = ROOT / "benchmarks" / "training" / "freezing_time_worker.py"
TEXT = "sst2 1024"
POLICIES = ("cap 1/3", "guarded")
WALL_TIME = "wall time"
AIM = Target(0.97, at_least=True, of="value")


@dataclass(frozen=True)
class Run(Repeat):
    """What one run took and did; its metric is `WALL_TIME` in s.

    Attributes:
        work: Of all ranks, in forwards of one block for one row.
        plans: Stages x replicas of each epoch.
    """

    work: int
    plans: list[str] = field(repr=False)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=3)
    add = parser.add_argument
    add("--data", type=Path, default=ROOT.parent / "shared" / "data")
    add("--tasks", nargs="+", choices=(*DIGITS, TEXT), default=list(DIGITS))
    add("--slots", type=int, default=2, help="CPU slots, one process each")
    args = parser.parse_args(arguments)
    args.seeds = seeds_of(args)
    if args.quick:
        args.seeds, args.tasks = args.seeds[:1], ["digits"]
    return args


def make_run(args: argparse.Namespace, task: str, policy: str, turn: int) -> Run:
    """Make a run of a round, whose number decides the seed.

    Raises:
        RunFailed: it failed or took too long; names the log.
    """
    seed = args.seeds[turn]
    out = args.folder / f"{task}, {policy}, {seed}".replace("/", "-")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += [f"--nproc-per-node={args.slots}", str(WORKER), "--task", task]
    line += ["--policy", policy, "--seed", str(seed), "--slots", str(args.slots)]
    line += ["--model", str(args.model), "--data", str(args.data), "--out", str(out)]
    line += ["--epochs", "2"] if args.quick else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    sample = run_child(line, timeout_s=1800, log=out / "run.log", env=env)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    rows = [
        json.loads((out / f"work-{rank}.json").read_text())
        for rank in range(args.slots)
    ]
    wall_s = float(summary["total_seconds"])
    epochs = summary["epochs"]
    plans = [f"{each['num_stages']} x {each['num_replicas']}" for each in epochs]
    print(f"{task}, {policy}, seed {seed}: {wall_s:.2f} s", flush=True)
    return Run(sample, {WALL_TIME: wall_s}, work_of(rows), plans)


def ratios_of(task: str, series: Mapping[str, Series], *, quick: bool) -> list[Ratio]:
    """Return by how much each policy is faster than the best static plan.

    Args:
        task: The task.
        series: By policy.
        quick: One round is enough; not for publication.
    """
    static = series[UNFROZEN]
    found = []
    for policy in POLICIES:
        own = series[policy]
        works = [_median_work(each) for each in (static, own)]
        # Of equal work the planner may still have another plan: nothing is bounded.
        bound = works[0] / works[1] if works[0] != works[1] else None
        found += compared(
            f"{task}: best static / {policy}",
            static.row(WALL_TIME, "s"),
            own.row(WALL_TIME, "s"),
            better_than="best static",
            bound=bound,
            quick=quick,
            target=AIM if policy == "guarded" else None,
        )
    return found


def _median_work(series: Series) -> float:
    return statistics.median(run.work for run in runs_of(series))


def runs_of(series: Series) -> list[Run]:
    """Return the runs that count."""
    return [repeat for repeat in series.clean if isinstance(repeat, Run)]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    rows: list[Row] = []
    ratios: list[Ratio] = []
    plans: dict[str, dict[str, list[list[str]]]] = {}
    rounds_of: dict[str, object] = {}
    failed = False
    with tempfile.TemporaryDirectory() as name:
        args.folder = Path(name)
        real = TEXT in args.tasks
        args.model = unpack_model(args.folder / "model") if real else args.folder
        for task in args.tasks:
            rounds = run_rounds(
                (UNFROZEN, *POLICIES),
                functools.partial(make_run, args, task),
                repeats=len(args.seeds),
                limits=NO_LIMITS if args.quick else None,
            )
            print(rounds)
            series = rounds.series()
            failed = failed or any(each.failures for each in series.values())
            rounds_of[task] = rounds.to_json()
            plans[task] = {p: [r.plans for r in runs_of(s)] for p, s in series.items()}
            for policy, each in series.items():
                system = "best static" if policy == UNFROZEN else policy
                row = each.row(WALL_TIME, "s")
                rows.append(replace(row, system=f"{task}, {system}"))
            if all(each.clean for each in series.values()):
                ratios += ratios_of(task, series, quick=args.quick)
    lines = [
        [
            each.name,
            f"{each.value:.2f}",
            "-" if each.bound is None else f"{each.bound:.2f}",
        ]
        for each in ratios
    ]
    print(text_table(["ratio", "measured", "bound"], lines))
    if args.json is not None:
        write_json(
            args.json,
            args.json.stem,  # digits have a command, text has another
            rows,
            ratios,
            start=start,
            quick=args.quick,
            seeds=args.seeds,
            slots=args.slots,
            plans=plans,
            rounds=rounds_of,
        )
    return int(failed or any(each.above_bound for each in ratios))


if __name__ == "__main__":
    sys.exit(main())
