"""The published models through the pipeline, against the plain model of equal batch.

python benchmarks/pipe_models.py --json benchmarks/results/pipe_models.json

U-Net, AmoebaNet-D and ResNet-101 train on one batch each: plain, and over n stages with
m micro-batches, ``except_last``. On CPU the models are narrow and each stage has a
thread; on GPUs they have their published size and the stages take the devices in turn.
Published speed-ups stand alongside ours; they compare different batch sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.common import (
    Ratio,
    Repeat,
    Row,
    Sample,
    Series,
    add_common_arguments,
    begin,
    compared,
    interleave,
    write_json,
)
from harness.text import text_table
from pipe.cuts import balanced_cuts, move_stages, stage_devices
from pipe.history import MODEL_SPEEDUPS
from pipe.models import amoebanet_d, resnet101, unet
from pipetransformer.pipe import Pipe

PLAIN, STEP = "plain", "step time"


@dataclass(frozen=True)
class Workload:
    """A model, its batch, and what its outputs are compared with.

    Attributes:
        build: Makes the model.
        side: Of the images ``(rows, 3, side, side)``.
        rows: Of the batch.
    """

    build: Callable[[], nn.Sequential]
    side: int
    rows: int


CPU_WORKLOADS = {
    "unet": Workload(lambda: unet(depth=3, convolutions=2, width=8), 64, 32),
    "amoebanet": Workload(lambda: amoebanet_d(cells=6, filters=32, classes=10), 64, 32),
    "resnet101": Workload(lambda: resnet101(width=16, classes=10), 64, 32),
}
GPU_WORKLOADS = {
    "unet": Workload(lambda: unet(), 192, 128),
    "amoebanet": Workload(lambda: amoebanet_d(), 224, 96),
    "resnet101": Workload(lambda: resnet101(), 224, 128),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    add("--models", nargs="+", choices=CPU_WORKLOADS, default=list(CPU_WORKLOADS))
    add(
        "--stages", type=int, nargs="+", metavar="N", help="default: 1, 2; GPU: 1, 2, 4"
    )
    add("--microbatches", type=int, nargs="+", default=[1, 4, 8], metavar="M")
    args = parser.parse_args()
    if args.stages is None:
        args.stages = [1, 2] if args.device == "cpu" else [1, 2, 4]
    if args.quick:
        args.repeats, args.stages, args.microbatches = 1, args.stages[-1:], [4]
    return args


def shapes_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Return stages and micro-batches of all systems; no stages: the plain model."""
    return [(0, 1), *((n, m) for n in args.stages for m in args.microbatches)]


def label(model: str, stages: int, microbatches: int) -> str:
    """Return the name of a system; of the plain model for no stages."""
    return f"{model} n={stages} m={microbatches}" if stages else f"{model} {PLAIN}"


def make_step(
    workload: Workload, kind: str, seed: int, stages: int, microbatches: int
) -> Callable[[], None]:
    """Return what computes fresh gradients of the batch, through the pipe or not.

    Args:
        workload: Model and batch.
        kind: ``cpu`` or ``cuda``.
        seed: Of the weights and of the batch.
        stages: Number of stages; 0 for the plain model.
        microbatches: Of the pipeline.
    """
    torch.manual_seed(seed)
    model = workload.build()
    inputs = torch.randn(workload.rows, 3, workload.side, workload.side)
    devices = stage_devices(kind, max(1, stages))
    cuts = balanced_cuts(model, inputs[:1], len(devices))
    move_stages(model, cuts, devices)
    call: nn.Module = model
    if stages:
        call = Pipe.from_plan(
            model,
            cuts=cuts,
            num_microbatches=microbatches,
            checkpoint="except_last",
            devices=devices,
        )
    inputs = inputs.to(devices[0])

    def step() -> None:
        model.zero_grad()
        outputs: Tensor = call(inputs)
        outputs.square().mean().backward()  # type: ignore[no-untyped-call]
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    return step


def build(args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return the steps of all systems by name."""
    workloads = CPU_WORKLOADS if args.device == "cpu" else GPU_WORKLOADS
    return {
        label(model, *shape): make_step(
            workloads[model], args.device, args.seed, *shape
        )
        for model in args.models
        for shape in shapes_of(args)
    }


def speedups(args: argparse.Namespace, rows: Mapping[str, Row]) -> list[Ratio]:
    """Return each pipeline's speed-up over the plain model of the same batch."""
    found: list[Ratio] = []
    for model in args.models:
        plain = label(model, 0, 1)
        for name, row in rows.items():
            if name == plain or not name.startswith(f"{model} "):
                continue
            title = f"{name} / {plain}"
            found += compared(
                title, rows[plain], row, better_than=plain, quick=args.quick
            )
    return found


def print_tables(
    args: argparse.Namespace, rows: Mapping[str, Row], ratios: list[Ratio]
) -> None:
    """Print ours with the published speed-up of the same n and m, then all of those."""
    workloads = CPU_WORKLOADS if args.device == "cpu" else GPU_WORKLOADS
    values = {each.name: each.value for each in ratios}
    lines = []
    for model in args.models:
        plain = label(model, 0, 1)
        for shape in [
            (0, 1),
            *((n, m) for n in args.stages for m in args.microbatches),
        ]:
            row = rows[label(model, *shape)]
            told = values.get(f"{row.system} / {plain}")
            old = MODEL_SPEEDUPS.get(model, {}).get(shape)
            speed = workloads[model].rows / row.median if row.values else None
            lines.append(
                [
                    row.system,
                    f"{speed:.2f}" if speed else "failed",
                    f"{told:.3f}" if told else "-",
                    f"{old[0]:.3f}" if old else "-",
                ]
            )
    print(text_table([args.device, "samples/s", "x plain", "published"], lines))
    published = [
        [f"{model} n={n} m={m}", f"{ours:.3f}", f"{paper:.2f}"]
        for model, entries in MODEL_SPEEDUPS.items()
        for (n, m), (ours, paper) in entries.items()
    ]
    print(text_table(["published, unequal batches", "speed-up", "GPipe"], published))


def main() -> int:
    args = parse_args()
    start = begin()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("pipe_models: no CUDA device: not run", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    steps = build(args)

    def run(name: str, turn: int) -> Repeat:
        cpu, wall = time.process_time(), time.perf_counter()
        steps[name]()
        wall_s = time.perf_counter() - wall
        return Repeat(Sample(wall_s, time.process_time() - cpu), {STEP: wall_s})

    series: dict[str, Series] = interleave(list(steps), run, repeats=args.repeats)
    rows = {name: each.row(STEP, "s") for name, each in series.items()}
    ratios = speedups(args, rows)
    print_tables(args, rows, ratios)
    if args.json is not None:
        write_json(
            args.json,
            "pipe_models" if args.device == "cpu" else "pipe_models_gpu",
            list(rows.values()),
            ratios,
            start=start,
            quick=args.quick,
            device=args.device,
            devices=torch.cuda.device_count() if args.device == "cuda" else 0,
            stages=args.stages,
            microbatches=args.microbatches,
            published={
                label(model, *shape): ours
                for model, entries in MODEL_SPEEDUPS.items()
                for shape, (ours, _) in entries.items()
            },
            seed=args.seed,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
