"""What the pipeline itself costs: microseconds per cell above a plain loop.

python benchmarks/pipe_overhead.py --json benchmarks/results/pipe_overhead.json

A cell is one micro-batch on one stage. The stages are so small, ``nn.Linear(8, 8)``,
that almost nothing but overhead is left; the plain loop calls the same layers on the
same micro-batches. The systems run in turn, one at a time; METRICS.md derives the
columns. ``--pipe MODULE:ATTR`` puts another pipeline beside ours, called as
``attr(model, num_stages=N, chunks=M, checkpoint=MODE)``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from _harness import (
    Ratio,
    RatioRefused,
    Repeat,
    Row,
    Series,
    add_common_arguments,
    interleave,
    measured,
    ratio,
    write_json,
)
from _pipes import (
    CHECKPOINT_MODES,
    DISPATCHES,
    load_factory,
    our_pipe,
    plain_loop,
    tensor_of,
)
from _text import text_table
from torch import Tensor, nn

LOOP = "loop"
WIDTH = 8
ROWS = 4  # of a micro-batch
FORWARD, BACKWARD = "forward_us_per_cell", "backward_us_per_cell"
FORWARD_ABOVE = "forward_overhead_us_per_cell"
BACKWARD_ABOVE = "backward_overhead_us_per_cell"
UNIT = "us"
CPU = torch.device("cpu")
# How many cores threads with so little work keep busy says nothing about a
# disturbance; the medians over iterations and repeats cope with short ones.
TOLERANCE = 0.9

Call = Callable[[Tensor], Any]


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
    add("--pipe", metavar="MODULE:ATTR", help="another pipeline beside ours")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.iterations = min(args.repeats, 7), min(args.iterations, 15)
    return args


@dataclass(frozen=True)
class System:
    """What is called, its checkpoint mode (None for the loop), and what it trains."""

    call: Call
    mode: str | None
    model: nn.Sequential


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


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's cycle collector from running in the middle of a call."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def runner(
    args: argparse.Namespace,
    systems: Mapping[str, System],
    device: torch.device = CPU,
) -> Callable[[str, int], Repeat]:
    """Return what runs a system's iterations of one repeat.

    On a GPU the host's time is taken; the device is idle when the clock starts.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    rows = torch.randn(ROWS * args.microbatches, WIDTH, device=device)
    ones = torch.ones_like(rows)
    cells = args.stages * args.microbatches

    def run(name: str, turn: int) -> Repeat:
        system = systems[name]
        times: dict[str, list[float]] = {FORWARD: [], BACKWARD: []}

        def iterate() -> None:
            for _ in range(args.iterations):
                system.model.zero_grad()  # to None: a first gradient is not added
                wait()
                start = time.perf_counter()
                outputs = tensor_of(system.call(rows))
                times[FORWARD].append(time.perf_counter() - start)
                wait()
                start = time.perf_counter()
                outputs.backward(ones)  # type: ignore[no-untyped-call]
                times[BACKWARD].append(time.perf_counter() - start)
                del outputs  # freed in no system's time

        with no_collections():
            sample = measured(iterate)
        return Repeat(
            sample,
            {
                metric: 1e6 * statistics.median(values) / cells
                for metric, values in times.items()
            },
        )

    return run


def recomputed_share(mode: str | None, microbatches: int) -> float:
    """Share of the cells whose forward is run again in backward."""
    if mode == "always":
        return 1.0
    return (microbatches - 1) / microbatches if mode == "except_last" else 0.0


def overheads(
    name: str, series: Mapping[str, Series], share: float
) -> tuple[Row, Row, Row]:
    """Return a system's rows above the loop, pair by pair of repeats.

    A recomputed forward is work and no overhead: the loop's forward of the cells that
    are recomputed counts as the loop's backward.

    Args:
        name: The system.
        series: All repeats; those of the same number are pairs.
        share: See `recomputed_share`.

    Returns:
        Forward, backward, and both together.
    """
    own_forward, own_backward, forward, backward = (
        series[system].row(metric, UNIT)
        for system in (name, LOOP)
        for metric in (FORWARD, BACKWARD)
    )
    turns = sorted(own_forward.by_turn().keys() & forward.by_turn().keys())

    def row(metric: str, value: Callable[[int], float]) -> Row:
        values = tuple(value(turn) for turn in turns)
        return Row(
            name,
            metric,
            UNIT,
            values,
            turns=tuple(turns),
            dropped=own_forward.dropped,
            failed=own_forward.failed,
            foreign_share=own_forward.foreign_share,
        )

    def above_forward(turn: int) -> float:
        return own_forward.by_turn()[turn] - forward.by_turn()[turn]

    def above_backward(turn: int) -> float:
        loop = backward.by_turn()[turn] + share * forward.by_turn()[turn]
        return own_backward.by_turn()[turn] - loop

    return (
        row(FORWARD_ABOVE, above_forward),
        row(BACKWARD_ABOVE, above_backward),
        row("overhead_us_per_cell", lambda k: above_forward(k) + above_backward(k)),
    )


Rows = Mapping[tuple[str, str], Row]


def rivals(args: argparse.Namespace, rows: Rows) -> list[Ratio]:
    """Return the other pipeline's times over ours, mode by mode."""
    found = []
    for mode in args.modes if args.pipe is not None else ():
        for metric in (FORWARD, BACKWARD):
            name = f"{args.pipe} / ours, {mode}, {metric.partition('_')[0]}"
            over, under = rows[f"{args.pipe} {mode}", metric], rows[mode, metric]
            try:
                found.append(
                    ratio(name, over, under, better_than=args.pipe, quick=args.quick)
                )
            except RatioRefused as refusal:
                print(f"refused: {refusal}")
    return found


def print_table(systems: Mapping[str, System], rows: Rows) -> None:
    """Print medians and, in brackets, the ranges."""
    metrics = (FORWARD, BACKWARD, FORWARD_ABOVE, BACKWARD_ABOVE)

    def cell(name: str, metric: str) -> str:
        row = rows.get((name, metric))
        if row is None or not row.values:
            return "-"
        return f"{row.median:.2f} ({min(row.values):.2f} to {max(row.values):.2f})"

    headers = ["us per cell", "forward", "backward", "forward above", "backward above"]
    print(text_table(headers, [[n, *(cell(n, m) for m in metrics)] for n in systems]))


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    systems = build(args)
    gc.freeze()  # so that the collections between the repeats are short
    series = interleave(
        list(systems),
        runner(args, systems),
        repeats=args.repeats,
        tolerance=TOLERANCE,
    )
    found = [
        s.row(metric, UNIT) for s in series.values() for metric in (FORWARD, BACKWARD)
    ]
    for name, system in systems.items():
        if system.mode is not None:
            share = recomputed_share(system.mode, args.microbatches)
            found += overheads(name, series, share)
    rows = {(row.system, row.metric): row for row in found}
    print_table(systems, rows)
    ratios = rivals(args, rows)
    for told in ratios:
        print(f"{told.name}: {told.value:.2f} ({told.min:.2f} to {told.max:.2f})")
    if args.json is not None:
        write_json(
            args.json,
            "pipe_overhead",
            found,
            ratios,
            quick=args.quick,
            stages=args.stages,
            microbatches=args.microbatches,
            iterations=args.iterations,
            dispatch=args.dispatch,
            seed=args.seed,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
