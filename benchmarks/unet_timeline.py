"""What each mechanism of the pipeline is worth, on a U-Net: an ablation.

python benchmarks/unet_timeline.py --json benchmarks/results/unet_timeline.json

The first variant has no order rule between micro-batches, copies on the compute
streams and passes skips along in tuples; each further one adds a mechanism, the last
one takes early recomputation away again. Prints samples per second and the memory of
activations alongside the published table. On CPU memory is the bytes of layer outputs
alive at a time, and copy streams are not run: nothing is copied there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from harness.text import text_table
from pipe.cuts import balanced_cuts, move_stages, stage_devices
from pipe.history import UNET_TIMELINE
from pipe.live_bytes import LiveOutputs
from pipe.models import unet
from pipetransformer.pipe import Pipe
from pipetransformer.testing.ablation import Ablation, ablate

STEP, MEMORY = "step time", "peak memory"


@dataclass(frozen=True)
class Scale:
    """Sizes of the network and of one batch."""

    depth: int
    convolutions: int
    width: int
    side: int
    rows: int
    microbatches: int
    stages: int


SCALES = {
    "tiny": Scale(2, 1, 8, 32, 16, 4, 2),
    "cpu": Scale(4, 2, 8, 64, 32, 8, 4),
    "paper": Scale(5, 5, 64, 192, 128, 8, 4),
}


@dataclass(frozen=True)
class Variant:
    """Which mechanisms are on."""

    name: str
    order_rule: bool
    copy_streams: bool
    direct_skips: bool
    early_recompute: bool = True


# The first four are the lines of the published table.
VARIANTS = (
    Variant("baseline", False, False, False),
    Variant("+ order rule", True, False, False),
    Variant("+ copy streams", True, True, False),
    Variant("+ direct skips", True, True, True),
    Variant("- early recomputation", True, True, True, early_recompute=False),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    add("--scale", choices=SCALES, help="default: paper on a GPU, else cpu")
    args = parser.parse_args()
    if args.scale is None:
        args.scale = "paper" if args.device == "cuda" else "cpu"
    if args.quick:
        args.repeats, args.scale = 1, "tiny"
    return args


class Runner:
    """One variant: its pipeline and its batch.

    Args:
        variant: Which mechanisms are on.
        scale: Sizes.
        kind: ``cpu`` or ``cuda``.
        seed: Of the weights and of the batch.
    """

    def __init__(self, variant: Variant, scale: Scale, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = unet(
            depth=scale.depth,
            convolutions=scale.convolutions,
            width=scale.width,
            direct=variant.direct_skips,
        )
        devices = stage_devices(kind, scale.stages)
        self.inputs = torch.randn(scale.rows, 3, scale.side, scale.side)
        self.targets = torch.rand(scale.rows, 1, scale.side, scale.side)
        cuts = balanced_cuts(self.model, self.inputs[:1], scale.stages)
        move_stages(self.model, cuts, devices)
        self.inputs = self.inputs.to(devices[0])
        self.targets = self.targets.to(devices[-1])
        self._devices = sorted({d for d in devices if d.type == "cuda"}, key=str)
        self.pipe = Pipe.from_plan(
            self.model,
            cuts=cuts,
            num_microbatches=scale.microbatches,
            checkpoint="except_last",
            devices=devices,
            # A single dispatcher would order the cells by itself.
            dispatch="threads" if kind == "cpu" else "auto",
        )
        ablation = Ablation(
            order_rule=variant.order_rule,
            copy_streams=variant.copy_streams,
            early_recompute=variant.early_recompute,
        )
        ablate(self.pipe, ablation)

    def step(self) -> None:
        """Compute fresh gradients of the whole batch; done when this returns."""
        self.model.zero_grad()
        outputs = self.pipe(self.inputs)
        assert isinstance(outputs, Tensor)
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._synchronize()

    def timed(self) -> Sample:
        """Time one step."""
        cpu, wall = time.process_time(), time.perf_counter()
        self.step()
        wall_s = time.perf_counter() - wall
        return Sample(wall_s, time.process_time() - cpu)

    def peak_bytes(self) -> int:
        """Return the most memory that a step takes, see the module's text."""
        if not self._devices:
            live = LiveOutputs(self.model)
            with live.counting():
                self.step()
            return live.peak
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        self.step()
        return sum(torch.cuda.max_memory_allocated(d) for d in self._devices)

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


def variants_on(kind: str) -> tuple[Variant, ...]:
    """Return what can be run: nothing is copied between CPU stages."""
    if kind == "cuda":
        return VARIANTS
    return tuple(v for v in VARIANTS if v.name != "+ copy streams")


def speedups(rows: Mapping[str, Row], *, quick: bool) -> list[Ratio]:
    """Return each variant's speed-up over the first, and early recomputation's."""
    pairs = [(VARIANTS[0].name, name) for name in rows if name != VARIANTS[0].name]
    pairs.append((VARIANTS[-1].name, VARIANTS[-2].name))
    found: list[Ratio] = []
    for over, under in pairs:
        title = f"{under} / {over}"
        found += compared(title, rows[over], rows[under], better_than=over, quick=quick)
    return found


def print_table(
    scale: Scale,
    kind: str,
    rows: Mapping[tuple[str, str], Row],
    ratios: Sequence[Ratio],
) -> None:
    """Print ours alongside the published table."""
    values = {each.name: each.value for each in ratios}
    lines = []
    for k, variant in enumerate(VARIANTS):
        line = [variant.name]
        time_row = rows.get((variant.name, STEP))
        if time_row is None or not time_row.values:
            line += ["not run"] * 3
        else:
            told = values.get(f"{variant.name} / {VARIANTS[0].name}")
            line += [f"{scale.rows / time_row.median:.2f}"]
            line += [f"{told:.3f}" if told else "-"]
            line.append(f"{rows[variant.name, MEMORY].median:.1f}")
        if k < len(UNET_TIMELINE):
            old = UNET_TIMELINE[k]
            line += [f"{old.samples_per_s:.1f}", f"{old.speedup:.3f}"]
            line.append(f"{old.memory_gib:.1f}")
        else:
            line += ["-"] * 3
        lines.append(line)
    headers = [kind, "samples/s", "x baseline", "MiB", "published", "x", "GiB"]
    print(text_table(headers, lines))


def main() -> int:
    args = parse_args()
    start = begin()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("unet_timeline: no CUDA device: not run", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    scale = SCALES[args.scale]
    runners = {
        variant.name: Runner(variant, scale, args.device, args.seed)
        for variant in variants_on(args.device)
    }

    def run(name: str, turn: int) -> Repeat:
        sample = runners[name].timed()
        return Repeat(sample, {STEP: sample.wall_s})

    series = interleave(list(runners), run, repeats=args.repeats)
    rows = {(name, STEP): each.row(STEP, "s") for name, each in series.items()}
    for name, runner in runners.items():
        peaks = tuple(runner.peak_bytes() / 2**20 for _ in range(max(1, args.repeats)))
        rows[name, MEMORY] = Row(name, MEMORY, "MiB", peaks)
    times = {name: rows[name, STEP] for name in runners}
    ratios = speedups(times, quick=args.quick)
    print_table(scale, args.device, rows, ratios)
    if args.json is not None:
        write_json(
            args.json,
            "unet_timeline" if args.device == "cpu" else "unet_timeline_gpu",
            list(rows.values()),
            ratios,
            start=start,
            quick=args.quick,
            device=args.device,
            devices=len(set(stage_devices(args.device, scale.stages))),
            scale=vars(scale),
            variants=[vars(variant) for variant in VARIANTS],
            not_run=[v.name for v in VARIANTS if v.name not in runners],
            published=[vars(entry) for entry in UNET_TIMELINE],
            seed=args.seed,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
