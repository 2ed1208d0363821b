"""Whether stages that wait outside the interpreter's lock overlap in both passes.

python benchmarks/pipe_overlap.py --json benchmarks/results/pipe_overlap.json

Two CPU stages that sleep 0.1 s per micro-batch, forward and backward, four
micro-batches: a loop needs 0.8 s per pass, a pipeline 0.5 s at best. ``--pipe
MODULE:ATTR`` puts another pipeline alongside ours, called as
``attr(model, num_stages=N, chunks=M, checkpoint="never")``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.common import (
    Ratio,
    Repeat,
    Sample,
    add_common_arguments,
    begin,
    compared,
    interleave,
    write_json,
)
from harness.text import text_table
from pipe.pipes import DISPATCHES, load_factory, our_pipe, plain_loop, tensor_of

LOOP, OURS = "loop", "never"
FORWARD, BACKWARD = "forward", "backward"


class Sleep(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:  # noqa: D102
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        time.sleep(ctx.seconds)
        return gradients[0], None


class SlowStage(nn.Module):
    """A scale factor; each call sleeps, and so does its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        """Return the scaled value, of the same shape."""
        slow: Tensor = Sleep.apply(  # type: ignore[no-untyped-call]
            value * self.scale, self.seconds
        )
        return slow


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    add = parser.add_argument
    add("--stages", type=int, default=2)
    add("--microbatches", type=int, default=4)
    add("--sleep", type=float, default=0.1, metavar="SECONDS", help="of a cell")
    add("--dispatch", choices=DISPATCHES, default="auto")
    add("--pipe", metavar="MODULE:ATTR", help="another pipeline alongside ours")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    return args


def build(args: argparse.Namespace) -> dict[str, Callable[[Tensor], Any]]:
    """Return all systems; each has a model of its own."""

    def model() -> nn.Sequential:
        return nn.Sequential(*(SlowStage(args.sleep) for _ in range(args.stages)))

    m = args.microbatches
    systems: dict[str, Callable[[Tensor], Any]] = {
        LOOP: plain_loop(model(), m),
        OURS: our_pipe(model(), chunks=m, checkpoint="never", dispatch=args.dispatch),
    }
    if args.pipe is not None:
        factory = load_factory("--pipe", args.pipe)
        systems[args.pipe] = factory(
            model(), num_stages=args.stages, chunks=m, checkpoint="never"
        )
    return systems


def run(call: Callable[[Tensor], Any], microbatches: int) -> Repeat:
    """Time one forward and one backward."""
    cpu, start = time.process_time(), time.perf_counter()
    outputs = tensor_of(call(torch.ones(microbatches, 1)))
    middle = time.perf_counter()
    outputs.sum().backward()  # type: ignore[no-untyped-call]
    end = time.perf_counter()
    sample = Sample(end - start, time.process_time() - cpu)
    return Repeat(sample, {FORWARD: middle - start, BACKWARD: end - middle})


def main() -> int:
    args = parse_args()
    start = begin()
    torch.set_num_threads(1)
    systems = build(args)
    series = interleave(
        list(systems),
        lambda name, turn: run(systems[name], args.microbatches),
        repeats=args.repeats,
    )
    rows = {
        (name, metric): series[name].row(metric, "s")
        for name in systems
        for metric in (FORWARD, BACKWARD)
    }
    lines = [
        [n, *(f"{rows[n, metric].median:.3f}" for metric in (FORWARD, BACKWARD))]
        for n in systems
    ]
    ideal = args.sleep * (args.microbatches + args.stages - 1)
    print(text_table(["s per pass", FORWARD, BACKWARD], lines))
    print(f"ideal: {ideal:.3f}")
    ratios: list[Ratio] = []
    for (name, metric), row in rows.items():
        if name != LOOP:
            title, loop = f"{name} / {LOOP}, {metric}", rows[LOOP, metric]
            ratios += compared(title, loop, row, better_than=LOOP, quick=args.quick)
    if args.json is not None:
        write_json(
            args.json,
            "pipe_overlap",
            list(rows.values()),
            ratios,
            start=start,
            quick=args.quick,
            stages=args.stages,
            microbatches=args.microbatches,
            sleep_s=args.sleep,
            ideal_s=ideal,
            dispatch=args.dispatch,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
