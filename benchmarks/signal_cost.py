"""What the statistics of freeze policies cost: their share of a run's passes.

python benchmarks/signal_cost.py --json benchmarks/results/signal_cost.json

Policies only watch (``dry_run``), so all systems train alike, which is checked to the
last bit of every loss: a digits ViT in one process, batches of 32, an evaluation point
per epoch, at whose end the statistics are read and plasticity runs its batch. The run's
own clock tells what they take: of each step, and at each evaluation point. The time of
an epoch over that of ``never``, from the second epoch's first step to the last epoch's
end, stands beside it; a twin of ``never`` tells what is noise. **Aim**: half a percent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import pipetransformer as pt
from harness.common import (
    Repeat,
    Row,
    Target,
    add_common_arguments,
    begin,
    interleave,
    measured,
    ratio,
    write_json,
)
from harness.text import text_table
from pipetransformer.autofreeze import Policy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import vit_digits

NEVER, AGAIN = "never", "never again"
SYSTEMS: dict[str, Callable[[], Policy]] = {
    NEVER: pt.freeze.Never,
    AGAIN: pt.freeze.Never,
    "loss (Guarded)": lambda: pt.freeze.Guarded(dry_run=True),
    "gradient norms (AlphaCap)": lambda: pt.freeze.AlphaCap(1 / 3, dry_run=True),
    "L1 norms (AutoFreeze)": lambda: pt.freeze.AutoFreeze(50, dry_run=True),
    "plasticity": lambda: pt.freeze.Plasticity(dry_run=True),
}
MOST = 0.5  # percent
SHARE = "share"
BATCH = 32


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=15)
    parser.add_argument("--epochs", type=int, default=4, help="of a run, timed and not")
    parser.add_argument("--samples", type=int, default=1078)
    args = parser.parse_args(arguments)
    if args.quick:
        args.repeats, args.epochs, args.samples = 1, 2, 96
    return args


class Bench:
    """Short runs that differ in their freeze policy alone."""

    def __init__(self, samples: int, epochs: int) -> None:
        self._data = vit_digits.load_split()[0].first(samples)
        self._epochs = epochs
        self._losses: list[float] | None = None

    def run(self, name: str, _: int) -> Repeat:
        """Train; return seconds per timed epoch.

        Raises:
            RuntimeError: a loss differs from those of the runs before.
        """
        torch.manual_seed(0)
        losses: list[float] = []
        engine = pt.PipeTransformer(
            vit_digits.build_vit(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            loss=torch.nn.functional.cross_entropy,
            units=vit_digits.freeze_units(vit_digits.build_vit()),
            freeze=SYSTEMS[name](),
            # Another number of micro-batches would round otherwise.
            config=pt.Config(
                seed=0, plan=pt.PlanConfig(num_stages=1, num_microbatches=1)
            ),
        )
        with engine:
            epochs = iter(engine.epochs(self._epochs))

            def some(count: int) -> None:
                for _ in range(count):
                    next(epochs)
                    for batch in engine.batches(self._data, BATCH):
                        losses.append(float(engine.step(batch)))

            some(1)
            timed = self._epochs - 1

            def rest() -> None:
                some(timed)
                for _ in epochs:  # the last pass ends
                    raise RuntimeError("epochs: expected no more")

            sample = measured(rest)
        if self._losses is None:
            self._losses = losses
        if losses != self._losses:
            raise RuntimeError(f"{name}: expected the losses of {NEVER}, got others")
        history = engine.history
        passes = sum(epoch.seconds for epoch in history.epochs)
        own = sum(
            seconds
            for phase, seconds in history.phase_seconds.items()
            if "signals" in phase.split("/")
        )
        return Repeat(
            sample, {"time": sample.wall_s / timed, SHARE: 100 * own / passes}
        )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    bench = Bench(args.samples, args.epochs)
    found = interleave(list(SYSTEMS), bench.run, repeats=args.repeats)
    rows: list[Row] = [each.row("time", "s per epoch") for each in found.values()]
    by_name = {row.system: row for row in rows}
    ratios, lines = [], []
    for name, series in found.items():
        if name == NEVER:
            continue
        each = ratio(
            f"{name} / {NEVER}",
            by_name[name],
            by_name[NEVER],
            better_than=NEVER,
            quick=args.quick,
        )
        ratios.append(each)
        percent = [100 * (value - 1) for value in (each.value, each.min, each.max)]
        line = [name, *(f"{value:+.2f}" for value in percent)]
        if name != AGAIN:
            target = None if name == "plasticity" else Target(MOST, of="median")
            share = replace(series.row(SHARE, "%"), target=target)
            rows.append(share)
            line.append(f"{share.median:.3f}")
            if target is not None:
                line.append("met" if share.median <= MOST else "missed")
        lines.append([*line, "", ""][:6])
    headers = ["percent above never", "median", "min", "max", "share", f"aim {MOST}"]
    print(text_table(headers, lines))
    if args.json is not None:
        write_json(
            args.json,
            "signal_cost",
            rows,
            ratios,
            start=start,
            quick=args.quick,
            epochs=args.epochs,
            batch=BATCH,
            seed=0,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
