"""Table 1: fine-tuning time of the whole system against honest rivals.

python benchmarks/table1_speedup.py --json benchmarks/results/table1_speedup.json

Seven systems train the same model on the same batches for the same number of steps,
interleaved, on CPU slots; each repeat has a seed of its own. Wall time is that of the
whole run: profiling, every transformation and every evaluation included. METRICS.md
derives each column.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import _workload
from _harness import RunFailed, Series, add_common_arguments, interleave, write_json
from _memory_cap import memory_cap
from _runs import Job, Result, run_job
from _systems import SYSTEMS
from _table1_report import NO_CAP, Table, print_table

CAP = "cap"
RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Setting:
    """A memory setting: its name, bytes per slot or None, and the systems that fit."""

    name: str
    slot_memory: int | None
    systems: tuple[str, ...]

    def flags(self) -> tuple[str, ...]:
        """Return the worker's flags."""
        if self.slot_memory is None:
            return ()
        return (f"--slot-memory={self.slot_memory}",)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    add = parser.add_argument
    add("--slots", type=int, default=2, help="CPU slots, one process each")
    add("--seeds", type=int, nargs="+", help="one per repeat, default: 0, 1, ...")
    add("--alpha", type=float, default=1 / 3, help="freezing pace, in [0, 1)")
    add("--epochs", type=int, default=_workload.EPOCHS)
    add("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    add("--settings", nargs="+", choices=[NO_CAP, CAP], default=[NO_CAP, CAP])
    add("--baseline-pipe", metavar="MODULE:ATTR", help="another static-pipe")
    add("--out", type=Path, default=Path("runs/table1"), metavar="DIR")
    args = parser.parse_args()
    if args.seeds is None:
        args.seeds = list(range(args.seed, args.seed + args.repeats))
    args.repeats = len(args.seeds)
    if args.quick:
        args.repeats, args.epochs, args.settings = 1, 2, [NO_CAP]
        args.systems = ["static-pipe", "best-static", "full"]
    return args


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return the settings asked for; pre-trains the model if need be."""
    model = _workload.pretrained(Path("runs"), args.seeds[0])
    systems = tuple(args.systems)
    settings = [Setting(NO_CAP, None, systems)]
    if CAP in args.settings:
        inputs, _ = _workload.load_split()[0].first(4).tensors()
        cap = memory_cap(
            model,
            inputs,
            slots=args.slots,
            batch_size=_workload.BATCH_SIZE,
            frozen_boundary=_workload.UNITS[first_freeze(args.alpha) - 1],
        )
        # One slot can not hold the unfrozen model, so plain DDP has no place.
        fitting = tuple(name for name in systems if name != "ddp")
        settings.append(Setting(CAP, cap, fitting))
    return [setting for setting in settings if setting.name in args.settings]


def first_freeze(alpha: float) -> int:
    """Return the units that the alpha cap freezes first."""
    units = len(_workload.UNITS)
    return math.ceil(units * alpha - 1e-9)


def calibrate(args: argparse.Namespace) -> dict[int, float]:
    """Return the seconds of one epoch of static-pipe for each M that is tried."""
    tried: dict[int, float] = {}
    for factor in (1, 2, 4, 8):
        microbatches = factor * args.slots
        flags = ["--epochs=1", f"--microbatches={microbatches}", *baseline(args)]
        job = Job("static-pipe", args.slots, args.seeds[0], tuple(flags), RUN_TIMEOUT_S)
        result = run_job(job, args.out, f"calibration-m{microbatches}")
        tried[microbatches] = result.summary["epochs"][0]["seconds"]
    return tried


def baseline(args: argparse.Namespace) -> list[str]:
    """Return the worker's flags for another pipeline class."""
    return [f"--baseline-pipe={args.baseline_pipe}"] if args.baseline_pipe else []


def runner(
    args: argparse.Namespace, setting: Setting, microbatches: int
) -> Callable[[str], Result]:
    """Return what runs a system once; its k-th run has the k-th seed."""
    turns = {name: itertools.count() for name in setting.systems}

    def run(name: str) -> Result:
        turn = next(turns[name])
        flags = [f"--epochs={args.epochs}", f"--alpha={args.alpha}", *setting.flags()]
        if name == "static-pipe":
            flags += [f"--microbatches={microbatches}", *baseline(args)]
        seed = args.seeds[turn % len(args.seeds)]
        job = Job(name, args.slots, seed, tuple(flags), RUN_TIMEOUT_S)
        where = f"{setting.name}-{name}-{turn}".replace("+", "-")
        try:
            result = run_job(job, args.out, where)
        except RunFailed as failure:
            print(f"{where}: {failure}", file=sys.stderr, flush=True)
            raise
        told = ", ".join(f"{key} {value:.2f}" for key, value in result.metrics.items())
        print(f"{where} (seed {seed}): {told}", flush=True)
        return result

    return run


def main() -> int:
    args = parse_args()
    print(*(SYSTEMS[name].describe() for name in args.systems), sep="\n")
    settings = settings_of(args)
    tried = calibrate(args)
    microbatches = min(tried, key=tried.__getitem__)
    tables = []
    for setting in settings:
        series: dict[str, Series] = interleave(
            setting.systems,
            runner(args, setting, microbatches),
            repeats=args.repeats,
            warmup=0,  # each run warms itself up; its first steps are part of it
        )
        tables.append(Table(setting.name, series, quick=args.quick))
    for table in tables:
        print_table(table)
    if args.json is not None:
        write_json(
            args.json,
            "table1_speedup",
            [row for table in tables for row in table.rows()],
            [ratio for table in tables for ratio in table.ratios()],
            quick=args.quick,
            seeds=args.seeds,
            alpha=args.alpha,
            slots=args.slots,
            epochs=args.epochs,
            baseline_pipe=args.baseline_pipe,
            calibration={f"M={m}": seconds for m, seconds in tried.items()},
            slot_memory={s.name: s.slot_memory for s in settings},
            settings={table.setting: table.sections() for table in tables},
        )
    return int(any(series.failures for t in tables for series in t.series.values()))


if __name__ == "__main__":
    sys.exit(main())
