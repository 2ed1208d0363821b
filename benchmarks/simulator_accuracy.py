"""How far the simulator is from what a step takes, on CPU slots.

python benchmarks/simulator_accuracy.py --json OUT.json

Random pipelines of 2 to 8 stages that wait, different from stage to stage, some with
frozen stages in front, and an encoder that computes, on one and two slots: each stage
is measured alone, with the planner's profiler; the simulator says what a step of the
whole pipeline takes under GPipe, 1F1B and ZB-H1, with and without recomputation; the
real `Pipe` runs it. Measuring the stages and running the pipeline take turns. Prints
the error of every case, and median and worst by kind; must: median <= 3 %, worst <=
10 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from harness.common import (
    Ratio,
    Row,
    Target,
    add_common_arguments,
    begin,
    compared,
    write_json,
)
from harness.quiet import add_patience_argument
from harness.text import text_table
from pipe.encoder import Shape
from simulated.accuracy import ALL, Error, Summary, summaries
from simulated.accuracy_cases import computing_subjects, waiting_subjects
from simulated.trials import Compared, Subject, Trial

MEDIAN, WORST = "median error", "worst error"
MEDIAN_AIM, WORST_AIM = 0.03, 0.10
LENGTHS = (2, 3, 4, 5, 6, 7, 8)
QUICK_LENGTHS = (2, 8)
STEPS = 3  # per repeat
SHAPE = Shape(blocks=6, tokens=64)
QUICK_SHAPE = Shape(blocks=4, tokens=32, rows=16)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    add_patience_argument(parser)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", metavar="K", help="of what waits")
    add("--per-length", type=int, default=4, help="waiting pipelines of each K")
    add("--no-waits", action="store_false", dest="waits", help="only what computes")
    add("--no-compute", action="store_false", dest="compute", help="only what waits")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.per_length = 1, min(3, args.per_length)
    if args.lengths is None:
        args.lengths = QUICK_LENGTHS if args.quick else LENGTHS
    return args


def subjects(args: argparse.Namespace) -> list[Subject]:
    """Return what is run, in order."""
    found = []
    steps = 1 if args.quick else STEPS
    if args.waits:
        found += waiting_subjects(args.lengths, args.per_length, args.seed, steps=steps)
    if args.compute:
        shape = QUICK_SHAPE if args.quick else SHAPE
        found += computing_subjects(shape, (1, 2), steps=steps)
    return found


def errors_of(
    subject: Subject, found: Sequence[Compared], quick: bool
) -> tuple[list[Ratio], list[Error]]:
    """Return simulated over measured, where that is not refused, and its error."""
    ratios, errors = [], []
    for each in found:
        case, name = each.case, each.measured.system
        title = f"{name}: simulated / measured"
        for ratio in compared(
            title, each.simulated, each.measured, better_than=name, quick=quick
        ):
            ratios.append(ratio)
            errors.append(
                Error(
                    name,
                    subject.name,
                    subject.kind,
                    case.schedule,
                    case.checkpoint,
                    case.num_stages,
                    case.num_microbatches,
                    each.measured.median,
                    ratio.value - 1,
                )
            )
    return ratios, errors


def summary_rows(errors: Sequence[Error]) -> list[Row]:
    """Return the sizes of the errors of all cases and of each kind, with the aims."""
    groups = {ALL: list(errors)} if errors else {}
    for error in errors:
        groups.setdefault(error.kind, []).append(error)
    aims = {MEDIAN: Target(MEDIAN_AIM), WORST: Target(WORST_AIM, of="max")}
    return [
        Row(
            group,
            metric,
            "share",
            tuple(abs(error.value) for error in of_group),
            values_of="cases",
            target=aim,
        )
        for group, of_group in groups.items()
        for metric, aim in aims.items()
    ]


def print_cases(errors: Sequence[Error]) -> None:
    """Print one line per case."""
    lines = [
        [
            e.case,
            f"{e.measured_s * 1e3:.1f}",
            f"{e.value:+.1%}",
        ]
        for e in errors
    ]
    print(text_table(["case", "measured ms", "simulated is off by"], lines))


def print_summaries(found: Sequence[Summary]) -> None:
    """Print one line per group."""
    lines = [
        [
            each.group,
            str(each.pipelines),
            str(each.cases),
            f"{each.median:.1%}",
            f"{each.worst:.1%}",
            f"{each.bias:+.1%}",
        ]
        for each in found
    ]
    print(
        text_table(
            ["simulated against measured", "pipelines", "cases", "median error"]
            + ["worst", "bias"],
            lines,
        )
    )


def print_verdicts(verdicts: Sequence[Row]) -> None:
    """Print whether the errors of all cases and of each kind are within their aims."""
    for row in verdicts:
        aim = row.target.bound if row.target else 0.0
        figure = max(row.values) if row.metric == WORST else row.median
        verdict = "met" if figure <= aim else "missed"
        print(f"{row.system}: {row.metric} {figure:.1%} (aim {aim:.0%}): {verdict}")


def main() -> int:
    args = parse_args()
    start = begin()
    torch.set_num_threads(1)
    rows: list[Row] = []
    ratios: list[Ratio] = []
    errors: list[Error] = []
    for subject in subjects(args):
        trial = Trial(subject, repeats=args.repeats, patience_s=args.patience)
        found = trial.run()
        rows += [row for each in found for row in (each.measured, each.simulated)]
        some, wrong = errors_of(subject, found, args.quick)
        ratios += some
        errors += wrong
    groups = summaries(errors)
    print_cases(errors)
    print_summaries(groups)
    verdicts = summary_rows(errors)
    print_verdicts(verdicts)
    if args.json is not None:
        write_json(
            args.json,
            "simulator_accuracy",
            [*verdicts, *rows],
            ratios,
            start=start,
            quick=args.quick,
            seed=args.seed,
            summaries=[asdict(each) for each in groups],
            errors=[asdict(each) for each in errors],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
