"""Figure 12: from how many frozen layers on the cache pays, and is switched on.

python benchmarks/fig12_cache_timing.py --json OUT.json

Two models of 12 layers on one slot: blocks of a transformer (64 tokens of width 384),
and layers that are nearly free, with wide activations. For 1 to 12 frozen layers a
sample is run through them, and read from a slab of host memory, in turn. What the
engine knows before a run, its profile and the rates of a small slab, decides whether
activations are read. Must: within one layer of where reading is measured to pay.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    decide,
    measure_rates,
    record_bytes,
)
from pipetransformer.config import PlanConfig
from pipetransformer.pipe import Workers
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock
from pipetransformer.run.cache_costs import prefix_ns

BATCH = 16
LAYERS = 12
AIM = 1  # layers between the measured and the chosen switch
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

    def decisions(self) -> list[bool]:
        """Return for 1 to 12 frozen layers whether activations would be read."""
        sizes = [n for n in PlanConfig().microbatch_samples if n <= BATCH]
        profile = planner.profile(
            self.layers, self._inputs[:BATCH], microbatch_samples=sizes
        )
        widest = max(layer.boundary_bytes_per_sample for layer in profile.layers)
        rates = measure_rates(widest, rows=BATCH, num_samples=len(self._inputs))
        if rates is None:
            raise RuntimeError("rates: expected memory for a small slab, got none")
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
        return [decide(rates, prospect).caches for prospect in prospects]

    def timed(self, boundary: int, repeats: int) -> dict[str, Series]:
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
        stores = {"recompute": None, "cached": cache}

        def one(ids: Tensor, store: ActivationCache | None) -> None:
            first = int(ids.min()) if store is cache and filling else 0
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
        filling = False

        def run(name: str, _: int) -> Repeat:
            done = 0

            def for_a_while() -> None:
                nonlocal done
                end = time.perf_counter() + self._seconds
                while done == 0 or time.perf_counter() < end:
                    one(torch.randperm(samples)[:BATCH], stores[name])
                    done += 1

            sample = measured(for_a_while)
            return Repeat(sample, {"time": 1e3 * sample.wall_s / (done * BATCH)})

        found = interleave(list(stores), run, repeats=repeats)
        cache.close()
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
        decided = bench.decisions()
        pays = {}
        for layers in args.layers:
            found = bench.timed(layers, args.repeats)
            computed, read = (each.row("time", "ms") for each in found.values())
            compared = ratio(
                f"{name}, {layers} frozen: cached / recompute",
                read,
                computed,
                better_than="recompute",
                quick=args.quick,
            )
            pays[layers] = compared.value < 1
            ratios.append(compared)
            rows += [
                dataclasses.replace(
                    row, system=f"{name}, {layers} frozen, {row.system}"
                )
                for row in (computed, read)
            ]
            chosen = "cached" if decided[layers - 1] else "recomputed"
            told = f"{compared.value:.3f} ({compared.min:.3f} to {compared.max:.3f})"
            lines.append([name, str(layers), told, chosen])
        bench.close()
        switch = first({n: decided[n - 1] for n in args.layers})
        apart = abs(first(pays) - switch)
        verdict = "missed" if apart > AIM else "met"
        rows.append(
            Row(
                name,
                "apart",
                "layers",
                (float(apart),),
                values_of="runs",
                target=Target(AIM),
            )
        )
        print(
            f"{name}: pays from {first(pays)} frozen layers, is cached from {switch} "
            f"(13: never); {apart} apart, aim {AIM}: {verdict}"
        )
    print(text_table(["model", "frozen", "cached / recomputed", "admission"], lines))
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
