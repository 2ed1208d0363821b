"""Fig. 10: what the freezing pace alpha gives and costs, paired over seeds.

python benchmarks/fig10_alpha.py --json benchmarks/results/fig10_alpha.json

The whole system trains once per seed and alpha, and once per seed unfrozen under the
planner's best static plan: same head, same batches, same number of steps. Prints each
seed's accuracy, the paired non-inferiority test and the speed-up; METRICS.md derives
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from harness.common import (
    Ratio,
    add_common_arguments,
    begin,
    compared,
    seeds_of,
    write_json,
)
from harness.paired import NonInferiority, non_inferiority
from harness.rounds import NO_LIMITS, Rounds, run_rounds
from harness.text import text_table
from training import workload
from training.runs import (
    ACCURACY,
    WALL_TIME,
    Job,
    Result,
    pace_without_freezing,
    run_job,
)
from training.systems import FULL, REFERENCE
from training.table1_report import median_work, results_of
from training.table1_text import told_ratio

UNFROZEN = "unfrozen"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    add = parser.add_argument
    add("--slots", type=int, default=2, help="CPU slots, one process each")
    add("--alphas", nargs="+", default=["1/5", "1/3", "1/2"], help="fractions")
    add("--out", type=Path, default=Path("runs/fig10"), metavar="DIR")
    args = parser.parse_args()
    args.epochs = workload.EPOCHS
    args.seeds = seeds_of(args)
    if args.quick:
        args.seeds, args.alphas, args.epochs = args.seeds[:1], ["1/2"], 2
    return args


class Curves:
    """Accuracy of every finished run: by system, seed and epoch.

    A round that other programs disturbed is dropped from the times; its accuracies
    are as good as any.
    """

    def __init__(self) -> None:
        self.curves: dict[str, dict[int, list[dict[str, float]]]] = {}

    def add(self, system: str, result: Result) -> None:
        """Keep a run's accuracy by epoch and by time."""
        self.curves.setdefault(system, {})[result.seed] = [
            {
                "elapsed_s": epoch["elapsed_seconds"],
                ACCURACY: 100.0 * epoch["accuracy"],
            }
            for epoch in result.summary["epochs"]
        ]

    def final(self, system: str, seed: int) -> float:
        """Return the accuracy after the last epoch in percent."""
        return self.curves[system][seed][-1][ACCURACY]

    def test(self, system: str, seeds: list[int]) -> NonInferiority:
        """Compare a system with the unfrozen one over the seeds."""
        return non_inferiority(
            [self.final(system, seed) for seed in seeds],
            [self.final(UNFROZEN, seed) for seed in seeds],
        )


def runner(args: argparse.Namespace, curves: Curves) -> Callable[[str, int], Result]:
    """Return what runs a system once; a repeat's number decides its seed."""

    def run(name: str, turn: int) -> Result:
        flags = [f"--epochs={args.epochs}"]
        if name != UNFROZEN:
            alpha = Fraction(name.removeprefix("alpha "))
            flags.append(f"--alpha={float(alpha)}")
        system = REFERENCE if name == UNFROZEN else FULL
        seed = args.seeds[turn]
        job = Job(system, args.slots, seed, tuple(flags))
        where = f"{name.replace(' ', '-').replace('/', '-')}-{turn}"
        result = run_job(job, args.out, where)
        curves.add(name, result)
        told = ", ".join(f"{key} {value:.2f}" for key, value in result.metrics.items())
        print(f"{where} (seed {seed}): {told}", flush=True)
        return result

    return run


def speedups(rounds: Rounds, *, quick: bool) -> list[Ratio]:
    """Return each alpha's speed-up over the unfrozen run, bounded by their work."""
    series = rounds.series()
    unfrozen = series[UNFROZEN]
    found = []
    for name, each in series.items():
        if name == UNFROZEN or not (each.clean and unfrozen.clean):
            continue
        work = median_work(results_of(unfrozen)) / median_work(results_of(each))
        found += compared(
            f"{name} / {UNFROZEN}",
            unfrozen.row(WALL_TIME, "s"),
            each.row(WALL_TIME, "s"),
            better_than=UNFROZEN,
            bound=work,
            quick=quick,
        )
    return found


def print_tables(
    args: argparse.Namespace, curves: Curves, tests: dict[str, NonInferiority]
) -> None:
    """Print accuracy by seed, and the tests."""
    names = [UNFROZEN, *tests]
    lines = [
        [str(seed), *(f"{curves.final(name, seed):.2f}" for name in names)]
        for seed in args.seeds
    ]
    print(text_table(["seed", *names], lines))
    for name, test in tests.items():
        print(f"{name} - {UNFROZEN}: {test}")


def main() -> int:
    args = parse_args()
    start = begin()
    workload.pretrained(Path("runs"), args.seeds[0])  # before any run is timed
    names = [UNFROZEN, *(f"alpha {alpha}" for alpha in args.alphas)]
    curves = Curves()
    rounds = run_rounds(
        names,
        runner(args, curves),
        repeats=len(args.seeds),
        limits=NO_LIMITS if args.quick else None,
        pace=lambda name, run: pace_without_freezing(run) if name == UNFROZEN else None,
    )
    print(rounds)
    series = rounds.series()
    for name, each in series.items():
        for failure in each.failures:
            print(f"{name} failed: {failure}", file=sys.stderr)
    failed = any(each.failures for each in series.values())
    tests = {}
    if not failed and len(args.seeds) > 1:
        tests = {name: curves.test(name, args.seeds) for name in names[1:]}
        print_tables(args, curves, tests)
    ratios = speedups(rounds, quick=args.quick)
    for told in ratios:
        print(f"{told.name}: {told_ratio(told)} ({told.min:.2f} to {told.max:.2f})")
    if args.json is not None:
        metrics = ((WALL_TIME, "s"), (ACCURACY, "%"))
        write_json(
            args.json,
            "fig10_alpha",
            [each.row(*metric) for each in series.values() for metric in metrics],
            ratios,
            start=start,
            quick=args.quick,
            seeds=args.seeds,
            alphas=args.alphas,
            slots=args.slots,
            epochs=args.epochs,
            rounds=rounds.to_json(),
            accuracy={name: test.to_json() for name, test in tests.items()},
            curves=curves.curves,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
