"""The pipeline on one CUDA device: what a cell costs, and whether stages overlap.

python benchmarks/gpu_pipe.py --json benchmarks/results/gpu_pipe.json

Cells: as in ``pipe_overhead.py``, with all stages on the device; the host's time is
taken, from an idle device until the call returns. Overlap: stages whose kernels do
nothing but take their time, on one stream and on a stream per stage, against n*m of
them one after another. Without CUDA it says that it was not run and ends with status
1, with ``--allow-no-gpu`` 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.common import (
    Ratio,
    Repeat,
    Row,
    Sample,
    add_common_arguments,
    begin,
    compared,
    interleave,
    write_json,
)
from harness.provenance import Start
from harness.text import text_table
from pipe.bounds import pipeline_speedup
from pipe.cells import LOOP, TOLERANCE, WIDTH, System, measure_cells, print_table
from pipe.pipes import CHECKPOINT_MODES, plain_loop, tensor_of
from pipetransformer.pipe import Pipe

STEP = "step time"
ONE_STREAM, OWN_STREAMS = "one stream", "stream per stage"
SLEEP_CYCLES = 400_000  # about 0.2 ms: many times what a cell costs the host


class _Sleep(torch.autograd.Function):
    """The identity, whose kernels take their time on a single multiprocessor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, cycles: int) -> Tensor:  # noqa: D102
        ctx.cycles = cycles
        _sleep(value.device, cycles)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        _sleep(gradients[0].device, ctx.cycles)
        return gradients[0], None


def _sleep(device: torch.device, cycles: int) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class SleepyStage(nn.Module):
    """A scale factor and a kernel that waits, in forward and in backward."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.cycles = cycles

    def forward(self, value: Tensor) -> Tensor:
        """Return the scaled value, of the same shape."""
        slow: Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            value * self.scale, self.cycles
        )
        return slow


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=9)
    add = parser.add_argument
    add("--stages", type=int, default=4)
    add("--microbatches", type=int, default=32)
    add("--iterations", type=int, default=30, help="of one repeat")
    add("--allow-no-gpu", action="store_true", help="status 0 without CUDA")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.iterations = 3, 5
    return args


def staged(
    model: nn.Sequential,
    device: torch.device,
    microbatches: int,
    checkpoint: str = "never",
    *,
    own_streams: bool = False,
) -> Pipe:
    """Return a pipeline of one stage per layer, all on one device."""
    return Pipe.from_plan(
        model,
        cuts=list(range(len(model) + 1)),
        num_microbatches=microbatches,
        checkpoint=checkpoint,
        devices=[device] * len(model),
        own_streams=own_streams,
    )


def cell_systems(args: argparse.Namespace, device: torch.device) -> dict[str, System]:
    """Return the loop and each checkpoint mode; each has a model of its own."""

    def model() -> nn.Sequential:
        torch.manual_seed(args.seed)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(args.stages)]
        return nn.Sequential(*layers).to(device)

    own = model()
    systems = {LOOP: System(plain_loop(own, args.microbatches), None, own)}
    for mode in CHECKPOINT_MODES:
        own = model()
        systems[mode] = System(staged(own, device, args.microbatches, mode), mode, own)
    return systems


def overlap_systems(
    args: argparse.Namespace, device: torch.device
) -> dict[str, Callable[[], None]]:
    """Return steps that end when the device is done."""
    rows = torch.ones(args.microbatches, 1, device=device)

    def step_of(call: Callable[[Tensor], Any]) -> Callable[[], None]:
        def step() -> None:
            tensor_of(call(rows)).sum().backward()  # type: ignore[no-untyped-call]
            wait_for(device)

        return step

    def model() -> nn.Sequential:
        layers = [SleepyStage(SLEEP_CYCLES) for _ in range(args.stages)]
        return nn.Sequential(*layers).to(device)

    count = args.microbatches
    return {
        LOOP: step_of(plain_loop(model(), count)),
        ONE_STREAM: step_of(staged(model(), device, count)),
        OWN_STREAMS: step_of(staged(model(), device, count, own_streams=True)),
    }


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_overlap(
    args: argparse.Namespace, device: torch.device
) -> tuple[list[Row], list[Ratio]]:
    """Return the step times and what the streams gain, printed."""
    steps = overlap_systems(args, device)

    def run(name: str, turn: int) -> Repeat:
        cpu, wall = time.process_time(), time.perf_counter()
        steps[name]()
        wall_s = time.perf_counter() - wall
        return Repeat(Sample(wall_s, time.process_time() - cpu), {STEP: wall_s})

    series = interleave(
        list(steps), run, repeats=args.repeats, warmup=2, tolerance=TOLERANCE
    )
    rows = {name: each.row(STEP, "s") for name, each in series.items()}
    ratios = gains(rows, quick=args.quick)
    values = {each.name: each.value for each in ratios}
    bounds = {OWN_STREAMS: pipeline_speedup(args.stages, args.microbatches)}
    lines = [
        [
            name,
            f"{row.median:.4f}",
            f"{values.get(f'{name} / {LOOP}', 1.0):.2f}",
            f"{bounds.get(name, 1.0):.2f}",
        ]
        for name, row in rows.items()
    ]
    print(text_table(["overlap", "s", "x loop", "formula"], lines))
    return list(rows.values()), ratios


def gains(rows: Mapping[str, Row], *, quick: bool) -> list[Ratio]:
    """Return each pipeline's speed-up over the loop."""
    found: list[Ratio] = []
    for name, row in rows.items():
        if name != LOOP:
            title = f"{name} / {LOOP}"
            found += compared(title, rows[LOOP], row, better_than=LOOP, quick=quick)
    return found


def run_all(args: argparse.Namespace, device: torch.device, start: Start) -> None:
    """Measure, print and write everything."""
    systems = cell_systems(args, device)
    rows = measure_cells(args, systems, device)
    print_table(systems, {(row.system, row.metric): row for row in rows})
    overlap_rows, ratios = measure_overlap(args, device)
    if args.json is not None:
        write_json(
            args.json,
            "gpu_pipe",
            [*rows, *overlap_rows],
            ratios,
            start=start,
            quick=args.quick,
            stages=args.stages,
            microbatches=args.microbatches,
            iterations=args.iterations,
            sleep_cycles=SLEEP_CYCLES,
            seed=args.seed,
            bound=pipeline_speedup(args.stages, args.microbatches),
        )


def main() -> int:
    args = parse_args()
    start = begin()
    if not torch.cuda.is_available():
        print("gpu_pipe: no CUDA device: not run", file=sys.stderr)
        return int(not args.allow_no_gpu)
    torch.set_num_threads(1)
    run_all(args, torch.device("cuda", 0), start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
