"""What the pipeline itself costs: microseconds per cell above a plain loop.

python benchmarks/pipe_overhead.py --json benchmarks/results/pipe_overhead.json

A cell is one micro-batch on one stage. The stages are so small, ``nn.Linear(8, 8)``,
that almost nothing but overhead is left; the plain loop calls the same layers on the
same micro-batches. The systems run in turn, one at a time; METRICS.md derives the
columns. ``--pipe MODULE:ATTR`` puts another pipeline alongside ours, called as
``attr(model, num_stages=N, chunks=M, checkpoint=MODE)``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch
from torch import nn

from harness.common import (
    Ratio,
    Row,
    Target,
    add_common_arguments,
    begin,
    compared,
    write_json,
)
from pipe.cells import (
    BACKWARD,
    BACKWARD_ABOVE,
    FORWARD,
    FORWARD_ABOVE,
    LOOP,
    WIDTH,
    Rows,
    System,
    measure_cells,
    print_table,
)
from pipe.history import OVERHEAD_US
from pipe.pipes import CHECKPOINT_MODES, DISPATCHES, load_factory, our_pipe, plain_loop

MOST_US = 10.0  # per cell above the loop, forward and backward


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=25)
    add = parser.add_argument
    add("--stages", type=int, default=4)
    add("--microbatches", type=int, default=32)
    add("--iterations", type=int, default=40, help="of one repeat")
    add("--modes", nargs="+", choices=CHECKPOINT_MODES, default=CHECKPOINT_MODES)
    add("--dispatch", choices=DISPATCHES, default="auto")
    add("--pipe", metavar="MODULE:ATTR", help="another pipeline alongside ours")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.iterations = min(args.repeats, 7), min(args.iterations, 15)
    return args


def build(args: argparse.Namespace) -> dict[str, System]:
    """Return all systems; each has a model of its own."""

    def model() -> nn.Sequential:
        torch.manual_seed(args.seed)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(args.stages)))

    shape = {"chunks": args.microbatches}
    own = model()
    systems = {LOOP: System(plain_loop(own, args.microbatches), None, own)}
    for mode in args.modes:
        own = model()
        pipe = our_pipe(own, checkpoint=mode, dispatch=args.dispatch, **shape)
        systems[mode] = System(pipe, mode, own)
    if args.pipe is None:
        return systems
    factory = load_factory("--pipe", args.pipe)
    for mode in args.modes:
        own = model()
        other = factory(own, num_stages=args.stages, checkpoint=mode, **shape)
        systems[f"{args.pipe} {mode}"] = System(other, mode, own)
    return systems


def rivals(args: argparse.Namespace, rows: Rows) -> list[Ratio]:
    """Return the other pipeline's times over ours, mode by mode."""
    found: list[Ratio] = []
    for mode in args.modes if args.pipe is not None else ():
        for metric in (FORWARD, BACKWARD):
            name = f"{args.pipe} / ours, {mode}, {metric.partition('_')[0]}"
            over, under = rows[f"{args.pipe} {mode}", metric], rows[mode, metric]
            found += compared(
                name, over, under, better_than=args.pipe, quick=args.quick
            )
    return found


def judged(modes: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    """Return the rows; those of ours above the loop have their target."""
    return [
        dataclasses.replace(row, target=Target(MOST_US))
        if row.system in modes and row.metric in (FORWARD_ABOVE, BACKWARD_ABOVE)
        else row
        for row in rows
    ]


def main() -> int:
    args = parse_args()
    start = begin()
    torch.set_num_threads(1)
    systems = build(args)
    found = judged(args.modes, measure_cells(args, systems))
    rows = {(row.system, row.metric): row for row in found}
    print_table(systems, rows, OVERHEAD_US)
    ratios = rivals(args, rows)
    for each in ratios:
        print(f"{each.name}: {each.value:.2f} ({each.min:.2f} to {each.max:.2f})")
    if args.json is not None:
        write_json(
            args.json,
            "pipe_overhead",
            found,
            ratios,
            start=start,
            quick=args.quick,
            stages=args.stages,
            microbatches=args.microbatches,
            iterations=args.iterations,
            dispatch=args.dispatch,
            published=OVERHEAD_US,
            seed=args.seed,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
