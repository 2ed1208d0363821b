"""Figure 12: from how many frozen layers on the cache pays, and is switched on.

python benchmarks/fig12_cache_timing.py --json OUT.json

Two models of 12 layers on one slot: blocks of a transformer (64 tokens of width 384),
and layers that are nearly free, with wide activations. For 1 to 12 frozen layers a
sample is run through them, read from a slab of host memory, and read from disk, three
batches ahead and past the page cache where the file system lets it, in turn. What the
engine knows before a run, its profile and the rates of a small slab and a small file,
decides whether activations are read. No step hides reads here. Must: within one layer
of where reading is measured to pay.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.common import (
    Repeat,
    Row,
    Series,
    Target,
    add_common_arguments,
    begin,
    interleave,
    measured,
    ratio,
    write_json,
)
from harness.text import text_table
from pipetransformer import planner
from pipetransformer.autocache import (
    ActivationCache,
    Prospect,
    bytes_on_disk,
    decide,
    least_budget,
    measure_disk_rates,
    measure_rates,
    on_disk,
    record_bytes,
)
from pipetransformer.config import PlanConfig
from pipetransformer.pipe import Workers
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock
from pipetransformer.run.cache_costs import prefix_ns

ROOT = Path(__file__).parents[1]
BATCH = 16
LAYERS = 12
AIM = 1  # layers between the measured and the chosen switch
AHEAD = 3  # batches that are read from disk before they are asked for
PATIENCE_S = 60.0  # of a batch: what is late would be recomputed
PASSES = 100  # still to come: writes count next to nothing, as in the timings


class Gate(nn.Module):
    """A layer that looks at an eighth of its wide input, and hands on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        """Return the values; the gate is 0."""
        gate = values[..., : values.shape[-1] // 8].sum() * self.bias
        return values if bool(gate <= 0) else values + gate


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(
        384, 6, 4 * 384, dropout=0.0, batch_first=True, norm_first=True
    )


@dataclass(frozen=True)
class Model:
    """What is frozen.

    Attributes:
        layer: Makes one of its layers.
        shape: Of a sample.
    """

    layer: Callable[[], nn.Module]
    shape: tuple[int, int]


MODELS = {
    "transformer": Model(block, (64, 384)),
    "nearly free": Model(Gate, (256, 1024)),
}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    add = parser.add_argument
    add("--samples", type=int, default=256)
    add("--disk", type=Path, default=ROOT / "build", help="a folder on a disk")
    # In a few milliseconds the kernel's clock ticks look like another program.
    add("--seconds", type=float, default=0.5, help="of one repeat")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--layers", type=int, nargs="+", default=list(range(1, LAYERS + 1)))
    args = parser.parse_args(arguments)
    if args.quick:
        args.repeats, args.samples, args.layers = 1, 32, [1, LAYERS]
        args.seconds = 0.0
    return args


class Bench:
    """A model, its inputs and a slab for a number of frozen layers."""

    def __init__(self, model: Model, samples: int, seconds: float) -> None:
        self._seconds = seconds
        self.layers = nn.Sequential(*(model.layer() for _ in range(LAYERS))).eval()
        self._inputs = torch.randn(samples, *model.shape)
        self._keys = torch.arange(samples)
        self._workers = Workers(1, intra_op_threads=torch.get_num_threads())

    def close(self) -> None:
        """End the worker."""
        self._workers.close()

    def decisions(self, folder: Path) -> dict[str, list[bool]]:
        """Return for 1 to 12 frozen layers whether activations would be read."""
        sizes = [n for n in PlanConfig().microbatch_samples if n <= BATCH]
        profile = planner.profile(
            self.layers, self._inputs[:BATCH], microbatch_samples=sizes
        )
        widest = max(layer.boundary_bytes_per_sample for layer in profile.layers)
        rates = measure_rates(widest, rows=BATCH, num_samples=len(self._inputs))
        disk = measure_disk_rates(widest, folder, num_samples=len(self._inputs))
        if rates is None or disk is None:
            raise RuntimeError("rates: expected memory and disk, got none")
        samples = len(self._inputs)
        prospects = [
            Prospect(
                boundary=n,
                prefix_ns=prefix_ns(profile, n, BATCH),
                record_bytes=profile.layers[n - 1].boundary_bytes_per_sample,
                held=samples,
                samples=samples,
                passes=PASSES,
            )
            for n in range(1, LAYERS + 1)
        ]
        below = [
            on_disk(
                dataclasses.replace(prospect, held=0),
                rates,
                held=samples,
                disk_bytes=bytes_on_disk(prospect.record_bytes),
                sharers=1,
            )
            for prospect in prospects
        ]
        return {
            "cached": [decide(rates, prospect).caches for prospect in prospects],
            "disk": [decide(disk, prospect).caches for prospect in below],
        }

    def timed(self, boundary: int, repeats: int, folder: Path) -> dict[str, Series]:
        """Return seconds per sample, computed and read, in turn."""
        prefix = FrozenPrefix(
            list(self.layers), boundary, self._workers, Clock(), seed=0
        )
        samples, place = len(self._inputs), DrawPosition(0, 0)
        slot = record_bytes([self._inputs[:1]])
        cache = ActivationCache.create(
            run_id="bench",
            num_samples=samples,
            slot_bytes=slot,
            budget_bytes=(samples + 1) * (slot + 1024) + 2**20,
        )
        # Slots for very few: almost all records go to the disk.
        lower = ActivationCache.create(
            run_id="bench",
            num_samples=samples,
            slot_bytes=slot,
            budget_bytes=least_budget(samples, slot),
        )
        lower.add_disk(folder, patience_s=PATIENCE_S)
        stores = {"recompute": None, "cached": cache, "disk": lower}

        def one(ids: Tensor, store: ActivationCache | None) -> None:
            first = int(ids.min()) if filling else 0
            inputs = self._inputs[first : first + len(ids)]  # loading is not timed
            prefix(
                lambda: inputs,
                ids,
                store,
                position=place,
                keys=self._keys[ids],
            )

        filling = True
        for ids in torch.split(torch.arange(samples), BATCH):
            one(ids, cache)
            one(ids, lower)
        filling = False

        def run(name: str, _: int) -> Repeat:
            done = 0

            def for_a_while() -> None:
                nonlocal done
                end = time.perf_counter() + self._seconds
                batches: list[Tensor] = []
                while done == 0 or time.perf_counter() < end:
                    while len(batches) <= AHEAD:
                        batches.append(torch.randperm(samples)[:BATCH])
                        if name == "disk":
                            lower.prefetch(batches[-1].tolist())
                    one(batches.pop(0), stores[name])
                    done += 1

            sample = measured(for_a_while)
            return Repeat(sample, {"time": 1e3 * sample.wall_s / (done * BATCH)})

        # The pace of a disk varies, and the kernel's work for it counts as others'.
        found = interleave(list(stores), run, repeats=repeats, tolerance=0.5)
        late = lower.counters.late
        cache.close()
        lower.close()
        if late:
            raise RuntimeError(f"disk: expected no late reads, got {late}")
        return found


def first(pays: dict[int, bool]) -> int:
    """Return the number of layers from which on it always pays; 13: never."""
    found = LAYERS + 1
    for layers in sorted(pays, reverse=True):
        if not pays[layers]:
            break
        found = layers
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    torch.manual_seed(args.seed)
    rows: list[Row] = []
    ratios, lines = [], []
    for name in args.models:
        bench = Bench(MODELS[name], args.samples, args.seconds)
        decided = bench.decisions(args.disk)
        pays: dict[str, dict[int, bool]] = {tier: {} for tier in decided}
        for layers in args.layers:
            found = bench.timed(layers, args.repeats, args.disk)
            times = {key: each.row("time", "ms") for key, each in found.items()}
            for tier in decided:
                compared = ratio(
                    f"{name}, {layers} frozen: {tier} / recompute",
                    times[tier],
                    times["recompute"],
                    better_than="recompute",
                    quick=args.quick,
                )
                pays[tier][layers] = compared.value < 1
                ratios.append(compared)
                chosen = "read" if decided[tier][layers - 1] else "recomputed"
                told = (
                    f"{compared.value:.3f} ({compared.min:.3f} to {compared.max:.3f})"
                )
                lines.append([name, str(layers), tier, told, chosen])
            rows += [
                dataclasses.replace(
                    row, system=f"{name}, {layers} frozen, {row.system}"
                )
                for row in times.values()
            ]
        bench.close()
        for tier, chosen_at in decided.items():
            switch = first({n: chosen_at[n - 1] for n in args.layers})
            pays_from = first(pays[tier])
            apart = abs(pays_from - switch)
            verdict = "missed" if apart > AIM else "met"
            rows.append(
                Row(
                    f"{name}, {tier}",
                    "apart",
                    "layers",
                    (float(apart),),
                    values_of="runs",
                    target=Target(AIM),
                )
            )
            print(
                f"{name}, {tier}: pays from {pays_from} frozen layers, is read from "
                f"{switch} (13: never); {apart} apart, aim {AIM}: {verdict}"
            )
    header = ["model", "frozen", "tier", "read / recomputed", "admission"]
    print(text_table(header, lines))
    if args.json is not None:
        write_json(
            args.json,
            "fig12_cache_timing",
            rows,
            ratios,
            start=start,
            quick=args.quick,
            batch=BATCH,
            samples=args.samples,
            seed=args.seed,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
