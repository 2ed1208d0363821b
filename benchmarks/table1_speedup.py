"""Table 1: fine-tuning time of the whole system against honest rivals.

python benchmarks/table1_speedup.py --json benchmarks/results/table1_speedup.json

All systems train the same model on the same batches for the same number of steps,
round after round, on CPU slots; each round has a seed of its own. Wall time is that of
the whole run: profiling, every transformation and every evaluation included; a second
set of ratios leaves the evaluations out. METRICS.md derives each column.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch

from harness.common import (
    Repeat,
    RunFailed,
    add_common_arguments,
    begin,
    seeds_of,
    write_json,
)
from harness.rounds import NO_LIMITS, Rounds, run_rounds
from training import workload
from training.memory_cap import memory_cap
from training.row_cost import row_seconds
from training.runs import ACCURACY, Job, Result, pace_without_freezing, run_job
from training.systems import (
    AGAIN,
    ANY_SCHEDULE,
    CACHED_DDP,
    FULL,
    REFERENCE,
    STATIC_PIPE,
    SYSTEMS,
    UNCACHED,
)
from training.table1_report import Table
from training.table1_text import print_table

NO_CAP, CAP = "no-cap", "cap"


@dataclass(frozen=True)
class Setting:
    """A memory setting.

    Attributes:
        name: As in the JSON.
        slot_memory: Bytes per slot, or None.
        systems: Those that fit.
        does_not_fit: Those that do not.
        same_as: Those that are left no choice, and what they then are.
    """

    name: str
    slot_memory: int | None
    systems: tuple[str, ...]
    does_not_fit: tuple[str, ...] = ()
    same_as: Mapping[str, str] = field(default_factory=dict)

    def flags(self) -> tuple[str, ...]:
        """Return the worker's flags."""
        if self.slot_memory is None:
            return ()
        return (f"--slot-memory={self.slot_memory}",)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    add = parser.add_argument
    add("--slots", type=int, default=2, help="CPU slots, one process each")
    add("--alpha", type=float, default=1 / 3, help="freezing pace, in [0, 1)")
    add("--epochs", type=int, default=workload.EPOCHS)
    add("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    add("--settings", nargs="+", choices=[NO_CAP, CAP], default=[NO_CAP, CAP])
    add("--baseline-pipe", metavar="MODULE:ATTR", help="another static-pipe")
    add("--out", type=Path, default=Path("runs/table1"), metavar="DIR")
    args = parser.parse_args()
    args.seeds = seeds_of(args)
    if args.quick:
        args.seeds, args.epochs, args.settings = args.seeds[:1], 2, [NO_CAP]
        args.systems = [CACHED_DDP, REFERENCE, FULL]
    return args


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return the settings asked for; pre-trains the model if need be."""
    model = workload.pretrained(Path("runs"), args.seeds[0])
    systems = tuple(args.systems)
    settings = []
    if NO_CAP in args.settings:
        # One stage, as the planner then chooses, knows no other schedule.
        fitting = tuple(name for name in systems if name != ANY_SCHEDULE)
        settings.append(Setting(NO_CAP, None, fitting))
    if CAP in args.settings:
        inputs, _ = workload.load_split()[0].first(4).tensors()
        sizes = {"slots": args.slots, "batch_size": workload.BATCH_SIZE}
        boundary = workload.UNITS[first_freeze(args.alpha) - 1]
        cap = memory_cap(model, inputs, frozen_boundary=boundary, **sizes)
        settings.append(capped(cap, systems, args.slots))
    return settings


def capped(cap: int, systems: tuple[str, ...], slots: int) -> Setting:
    """Return the setting in which only K = slots stages hold the unfrozen model.

    What it changes little is left out, so that a run stays below an hour:
    ``freeze+pipe+dp`` differs from its run without a cap before the first freeze alone.
    """
    absent = tuple(name for name in systems if SYSTEMS[name].whole_model)
    # Of two slots K = 2 alone is left to the best static plan; of more, who knows.
    forced = slots == 2 and {REFERENCE, STATIC_PIPE} <= {*systems}
    same_as = {REFERENCE: STATIC_PIPE} if forced else {}
    left_out = {*absent, *same_as, UNCACHED}
    fitting = tuple(name for name in systems if name not in left_out)
    return Setting(CAP, cap, fitting, absent, same_as)


def first_freeze(alpha: float) -> int:
    """Return the units that the alpha cap freezes first, at least 1."""
    return max(1, math.ceil(len(workload.UNITS) * alpha - 1e-9))


@dataclass(frozen=True)
class Calibration:
    """What is measured before the rounds.

    Attributes:
        epochs_s: Seconds of static-pipe's epochs for each M that is tried; empty
            where static-pipe does not run.
        rows_s: CPU seconds of a trained row, by rows of a micro-batch.
    """

    epochs_s: Mapping[int, Sequence[float]]
    rows_s: Mapping[int, float]

    @property
    def microbatches(self) -> int | None:
        """The M with the shortest epoch: what disturbs one only makes it longer."""
        if not self.epochs_s:
            return None
        return min(self.epochs_s, key=lambda m: min(self.epochs_s[m]))

    @property
    def row_factor(self) -> float:
        """Cost of a row in that M's micro-batches over that at the best size."""
        if self.microbatches is None:
            return 1.0
        rows = workload.BATCH_SIZE // self.microbatches
        return self.rows_s[rows] / min(self.rows_s.values())


def calibrate(args: argparse.Namespace) -> Calibration:
    """Try each M of static-pipe, and time a row in its micro-batches."""
    if STATIC_PIPE not in args.systems:
        return Calibration({}, {})
    tried = {}
    for microbatches in (args.slots, 2 * args.slots, 4 * args.slots, 8 * args.slots):
        flags = ("--epochs=4", f"--microbatches={microbatches}")
        job = Job(STATIC_PIPE, args.slots, args.seeds[0], flags, args.baseline_pipe)
        result = run_job(job, args.out, f"calibration-m{microbatches}")
        epochs = [float(epoch["seconds"]) for epoch in result.summary["epochs"]]
        tried[microbatches] = epochs
        print(f"static-pipe, M={microbatches}: shortest epoch {min(epochs):.2f} s")
    model = workload.pretrained(Path("runs"), args.seeds[0])
    inputs, targets = workload.load_split()[0].first(workload.BATCH_SIZE).tensors()
    torch.set_num_threads(1)
    sizes = {workload.BATCH_SIZE // m for m in (1, *tried)}
    return Calibration(tried, row_seconds(model, inputs, targets, sizes))


class Runner:
    """Runs the systems of all settings; a round's number decides its seed.

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

    def pace(self, title: str, repeat: Repeat) -> float | None:
        """Return the seconds of an epoch where all epochs do the same; for `judge`."""
        system = SYSTEMS[self._runs[title][1]]
        return None if system.freezes else pace_without_freezing(repeat)

    @property
    def titles(self) -> list[str]:
        """The names of all runs, in the order of a round.

        The same system once more comes last, after the systems of all settings.
        """
        return sorted(self._runs, key=lambda title: self._runs[title][1] == AGAIN)

    def _run(self, job: Job, where: str) -> Result:
        """Run a job; one that keeps a profile must find that of its round.

        Raises:
            RunFailed: it failed, or measured anew.
        """
        out = self._args.out
        if not SYSTEMS[job.system].keeps_profile:
            return run_job(job, out, where)
        folder = Path(out / "profiles" / str(job.seed)).resolve()
        job = replace(job, flags=(*job.flags, f"--profiles={folder}"))
        if not _files(folder):
            first = replace(job, flags=("--epochs=1", *job.flags[-1:]))
            run_job(first, out, f"first-of-kept-{job.seed}")
        kept = _files(folder)
        result = run_job(job, out, where)
        if not kept or _files(folder) != kept:
            raise RunFailed(f"expected it to find a profile in {folder}, got a new one")
        return result

    def __call__(self, title: str, turn: int) -> Result:
        """Run one system once.

        Raises:
            RunFailed: it failed; the reason is printed.
        """
        args, baseline = self._args, None
        setting, name = self._runs[title]
        flags = [f"--epochs={args.epochs}", f"--alpha={args.alpha}", *setting.flags()]
        if name in (STATIC_PIPE, AGAIN):
            flags.append(f"--microbatches={self._microbatches}")
            baseline = args.baseline_pipe
        job = Job(name, args.slots, args.seeds[turn], tuple(flags), baseline)
        where = f"{title}-{turn}".replace("+", "-").replace(" ", "-")
        try:
            result = self._run(job, where)
        except RunFailed as failure:
            print(f"{where}: {failure}", file=sys.stderr, flush=True)
            raise
        self.accuracies.setdefault(title, {})[job.seed] = result.metrics[ACCURACY]
        told = ", ".join(f"{key} {value:.2f}" for key, value in result.metrics.items())
        print(f"{where} (seed {job.seed}): {told}", flush=True)
        return result


def _files(folder: Path) -> dict[str, int]:
    """Return the profiles that are kept there, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("profile-*")}


def measure(
    args: argparse.Namespace, settings: Sequence[Setting], calibration: Calibration
) -> tuple[Rounds, list[Table]]:
    """Run the systems of all settings, round after round."""
    runner = Runner(args, settings, calibration.microbatches)
    # Each run warms itself up: its first steps are part of it.
    rounds = run_rounds(
        runner.titles,
        runner,
        repeats=len(args.seeds),
        limits=NO_LIMITS if args.quick else None,
        pace=runner.pace,
    )
    series = rounds.series()
    tables = []
    for setting in settings:
        titles = {name: runner.title(setting, name) for name in setting.systems}
        tables.append(
            Table(
                setting.name,
                {n: replace(series[t], system=n) for n, t in titles.items()},
                {n: runner.accuracies.get(t, {}) for n, t in titles.items()},
                does_not_fit=setting.does_not_fit,
                same_as=setting.same_as,
                row_factor=calibration.row_factor,
                quick=args.quick,
            )
        )
    return rounds, tables


def at_fault(table: Table) -> bool:
    """Tell whether a run failed, or a ratio is one that cannot be."""
    failed = any(series.failures for series in table.series.values())
    return failed or any(ratio.above_bound for ratio in table.ratios)


def main() -> int:
    args = parse_args()
    start = begin()
    print(*(SYSTEMS[name].describe() for name in args.systems), sep="\n")
    if args.baseline_pipe is not None:
        print(f"{STATIC_PIPE} is {args.baseline_pipe}, in a plain loop")
    settings = settings_of(args)
    calibration = calibrate(args)
    shutil.rmtree(args.out / "profiles", ignore_errors=True)
    rounds, tables = measure(args, settings, calibration)
    print(rounds)
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
            calibration={f"M={m}": list(s) for m, s in calibration.epochs_s.items()},
            row_seconds={str(rows): s for rows, s in calibration.rows_s.items()},
            rounds=rounds.to_json(),
            slot_memory={s.name: s.slot_memory for s in settings},
            settings={table.setting: table.sections() for table in tables},
        )
    return int(any(at_fault(table) for table in tables))


if __name__ == "__main__":
    sys.exit(main())
