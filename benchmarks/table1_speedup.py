"""Table 1: fine-tuning time of the whole system against honest rivals.

python benchmarks/table1_speedup.py --json benchmarks/results/table1_speedup.json

Seven systems train the same model on the same batches for the same number of steps,
interleaved, on CPU slots; each repeat has a seed of its own. Wall time is that of the
whole run: profiling, every transformation and every evaluation included. METRICS.md
derives each column.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import _workload
from _harness import (
    RunFailed,
    add_common_arguments,
    begin,
    interleave,
    seeds_of,
    write_json,
)
from _memory_cap import fits, memory_cap
from _runs import ACCURACY, Job, Result, run_job
from _systems import DDP, FULL, REFERENCE, STATIC_PIPE, SYSTEMS
from _table1_report import Table
from _table1_text import print_table

NO_CAP, CAP = "no-cap", "cap"


@dataclass(frozen=True)
class Setting:
    """A memory setting.

    Attributes:
        name: As in the JSON.
        slot_memory: Bytes per slot, or None.
        systems: Those that fit.
        does_not_fit: The others.
    """

    name: str
    slot_memory: int | None
    systems: tuple[str, ...]
    does_not_fit: tuple[str, ...] = ()

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
    add("--alpha", type=float, default=1 / 3, help="freezing pace, in [0, 1)")
    add("--epochs", type=int, default=_workload.EPOCHS)
    add("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    add("--settings", nargs="+", choices=[NO_CAP, CAP], default=[NO_CAP, CAP])
    add("--baseline-pipe", metavar="MODULE:ATTR", help="another static-pipe")
    add("--out", type=Path, default=Path("runs/table1"), metavar="DIR")
    args = parser.parse_args()
    args.seeds = seeds_of(args)
    if args.quick:
        args.seeds, args.epochs, args.settings = args.seeds[:1], 2, [NO_CAP]
        args.systems = [REFERENCE, FULL]
    return args


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return the settings asked for; pre-trains the model if need be."""
    model = _workload.pretrained(Path("runs"), args.seeds[0])
    systems = tuple(args.systems)
    settings = []
    if NO_CAP in args.settings:
        settings.append(Setting(NO_CAP, None, systems))
    if CAP in args.settings:
        inputs, _ = _workload.load_split()[0].first(4).tensors()
        sizes = {"slots": args.slots, "batch_size": _workload.BATCH_SIZE}
        boundary = _workload.UNITS[first_freeze(args.alpha) - 1]
        cap = memory_cap(model, inputs, frozen_boundary=boundary, **sizes)
        one_slot = fits(model, inputs, cap=cap, num_stages=1, **sizes)
        absent = () if one_slot else tuple(name for name in systems if name == DDP)
        fitting = tuple(name for name in systems if name not in absent)
        settings.append(Setting(CAP, cap, fitting, absent))
    return settings


def first_freeze(alpha: float) -> int:
    """Return the units that the alpha cap freezes first, at least 1."""
    return max(1, math.ceil(len(_workload.UNITS) * alpha - 1e-9))


def calibrate(args: argparse.Namespace) -> dict[int, float]:
    """Return static-pipe's shortest epoch in seconds for each M that is tried.

    What disturbs an epoch only makes it longer. Nothing is tried where static-pipe
    does not run.
    """
    tried: dict[int, float] = {}
    if STATIC_PIPE not in args.systems:
        return tried
    for factor in (1, 2, 4, 8):
        microbatches = factor * args.slots
        flags = ("--epochs=4", f"--microbatches={microbatches}")
        job = Job(STATIC_PIPE, args.slots, args.seeds[0], flags, args.baseline_pipe)
        result = run_job(job, args.out, f"calibration-m{microbatches}")
        seconds = [epoch["seconds"] for epoch in result.summary["epochs"]]
        tried[microbatches] = min(seconds)
    return tried


class Runner:
    """Runs the systems of all settings; a repeat's number decides its seed.

    Args:
        args: Of the command line.
        settings: All settings; their systems run in one interleaved series.
        microbatches: M of static-pipe.

    Attributes:
        accuracies: Final accuracy of every finished run, by title and seed: a run
            that other programs disturbed is as good as any in that.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        settings: Sequence[Setting],
        microbatches: int | None,
    ) -> None:
        self._args = args
        self._microbatches = microbatches
        self._shared = settings[0].name
        self._runs: dict[str, tuple[Setting, str]] = {}
        for setting in settings:
            for system in setting.systems:
                self._runs.setdefault(self.title(setting, system), (setting, system))
        self.accuracies: dict[str, dict[int, float]] = {}

    def title(self, setting: Setting, system: str) -> str:
        """Return the name of a system's runs.

        With K = slots forced the cap changes nothing: those runs serve all settings.
        """
        forced = not SYSTEMS[system].shrinks
        return f"{self._shared if forced else setting.name} {system}"

    @property
    def titles(self) -> list[str]:
        """The names of all runs."""
        return list(self._runs)

    def __call__(self, title: str, turn: int) -> Result:
        """Run one system once.

        Raises:
            RunFailed: it failed; the reason is printed.
        """
        args, baseline = self._args, None
        setting, name = self._runs[title]
        flags = [f"--epochs={args.epochs}", f"--alpha={args.alpha}", *setting.flags()]
        if name == STATIC_PIPE:
            flags.append(f"--microbatches={self._microbatches}")
            baseline = args.baseline_pipe
        job = Job(name, args.slots, args.seeds[turn], tuple(flags), baseline)
        where = f"{title}-{turn}".replace("+", "-").replace(" ", "-")
        try:
            result = run_job(job, args.out, where)
        except RunFailed as failure:
            print(f"{where}: {failure}", file=sys.stderr, flush=True)
            raise
        self.accuracies.setdefault(title, {})[job.seed] = result.metrics[ACCURACY]
        told = ", ".join(f"{key} {value:.2f}" for key, value in result.metrics.items())
        print(f"{where} (seed {job.seed}): {told}", flush=True)
        return result


def measure(
    args: argparse.Namespace, settings: Sequence[Setting], microbatches: int | None
) -> list[Table]:
    """Run the systems of all settings, interleaved."""
    runner = Runner(args, settings, microbatches)
    # Each run warms itself up: its first steps are part of it.
    series = interleave(runner.titles, runner, repeats=len(args.seeds), warmup=0)
    tables = []
    for setting in settings:
        titles = {name: runner.title(setting, name) for name in setting.systems}
        tables.append(
            Table(
                setting.name,
                {n: replace(series[t], system=n) for n, t in titles.items()},
                {n: runner.accuracies.get(t, {}) for n, t in titles.items()},
                does_not_fit=setting.does_not_fit,
                quick=args.quick,
            )
        )
    return tables


def main() -> int:
    args = parse_args()
    start = begin()
    print(*(SYSTEMS[name].describe() for name in args.systems), sep="\n")
    if args.baseline_pipe is not None:
        print(f"{STATIC_PIPE} is {args.baseline_pipe}, in a plain loop")
    settings = settings_of(args)
    tried = calibrate(args)
    microbatches = min(tried, key=tried.__getitem__) if tried else None
    tables = measure(args, settings, microbatches)
    for table in tables:
        print_table(table)
    if args.json is not None:
        write_json(
            args.json,
            "table1_speedup",
            [row for table in tables for row in table.rows()],
            [ratio for table in tables for ratio in table.ratios],
            start=start,
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
