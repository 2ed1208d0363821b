"""The whole job is killed at random steps and goes on with other processes and stages.

python benchmarks/kills_and_resumes.py --json benchmarks/results/kills_and_resumes.json

A run is ended by SIGKILL to all of its processes at once, at random optimizer steps
and places of the script: between steps, in a forward, halfway through an optimizer
step, in an evaluation, while a checkpoint is being written. After about every third
kill the newest checkpoint is cut or a byte of it changed. Each next part resumes from
the newest valid one, with another number of processes N and of stages K. Put together,
the parts must be the run that nobody interrupted: the same loss at every step, each
sample exactly once in every epoch. float64, no dropout, freezes down and up.

**Tolerance.** Parts sum in other orders (replicas, cached rows), so bits differ. One
step changes what it computes by at most n rounding errors, relatively, where n is the
longest chain of roundings in a step; what was changed at one step is at most G times
as large at a later one. Over T steps that is G * T * n * 2**-53. G is measured here:
a run that starts with weights changed by 1e-8 shows by how much more its losses and
last weights differ. n <= 2048: eight layers with at most 100 roundings each from an
input to an output, as many on the way back, then sums over 12 rows and the update.

With equal N and K in all parts, and no cache, the run must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from faults.kills_job import (
    Curve,
    random_parts,
    run_to_end,
    samples_exactly_once,
    tear_newest,
)
from faults.kills_worker import FREEZES, STEPS, Part
from harness.child import RunFailed
from harness.common import Row, Target, add_common_arguments, begin, write_json
from harness.forked import fork_server

ROUNDINGS = 2048
PERTURBATION = 1e-8
OTHER, SAME = "other N and K", "equal N and K"
SAME_PLAN = (2, 1)  # two replicas of one stage


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--kills", type=int, default=20, help="with other N and K")
    parser.add_argument("--same-kills", type=int, default=10, help="with equal ones")
    parser.add_argument("--epochs", type=int, default=len(FREEZES))
    args = parser.parse_args(arguments)
    if not 1 <= args.epochs <= len(FREEZES):
        parser.error(f"--epochs: expected 1 to {len(FREEZES)}, got {args.epochs}")
    if args.quick:
        args.kills, args.same_kills, args.epochs = 3, 1, 4
    return args


def differences(curve: Curve, reference: Curve) -> list[float]:
    """Return each epoch's largest relative difference of its losses."""
    pairs = zip(curve.losses, reference.losses, strict=True)
    steps = [abs(a - b) / abs(b) for a, b in pairs]
    ends = zip(curve.evaluations, reference.evaluations, strict=True)
    evaluations = [abs(a - b) / abs(b) for a, b in ends]
    return [
        max(*steps[epoch * STEPS : (epoch + 1) * STEPS], evaluations[epoch])
        for epoch in range(len(evaluations))
    ]


def weights_differ(folder: Path, curve: Curve, other: Path, reference: Curve) -> float:
    """Return the largest difference of a final weight over the largest weight."""
    mine, theirs = (
        torch.load(place / f"part-{run.parts[-1].part.number}" / "weights.pt")
        for place, run in ((folder, curve), (other, reference))
    )
    scale = max(float(w.abs().max()) for w in theirs)
    return max(
        float((a - b).abs().max()) / scale for a, b in zip(mine, theirs, strict=True)
    )


class Experiment:
    """Runs that nobody interrupted, runs that were, and what became of them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._draw = random.Random(args.seed)

    def undisturbed(self, name: str, world: int, stages: int, **options: Any) -> Curve:
        """Run one part from start to end."""
        part = Part(0, world, stages, self._args.epochs, **options)
        return run_to_end(self._folder / name, [part], lambda *_: "")

    def killed(self, name: str, kills: int, plan: tuple[int, int] | None) -> Curve:
        """Run parts of which all but the last are killed."""
        parts = random_parts(self._draw, kills, self._args.epochs, plan=plan)
        return run_to_end(
            self._folder / name,
            parts,
            lambda number, found: tear_newest(self._draw, number, found),
        )

    def growth(self, whole: str, reference: Curve) -> float:
        """Return how much a small change of the first weights grows, at least 1."""
        name = "changed"
        changed = self.undisturbed(name, 1, 1, perturbation=PERTURBATION)
        weights = weights_differ(
            self._folder / name, changed, self._folder / whole, reference
        )
        worst = max(*differences(changed, reference), weights)
        return max(1.0, worst / PERTURBATION)

    def compare(
        self, name: str, curve: Curve, whole: str, reference: Curve, tolerance: float
    ) -> dict[str, Any]:
        """Judge a run and print what is found."""
        by_epoch = differences(curve, reference)
        weights = weights_differ(
            self._folder / name, curve, self._folder / whole, reference
        )
        exact = curve.losses == reference.losses and weights == 0.0
        torn = sum(bool(done.torn) for done in curve.parts)
        result = {
            "kills": len(curve.parts) - 1,
            "damaged_checkpoints": torn,
            "plans": len({(d.part.world_size, d.part.num_stages) for d in curve.parts}),
            "difference_by_epoch": by_epoch,
            "weights_difference": weights,
            "tolerance": tolerance,
            "bitwise": exact,
            "samples_exactly_once": samples_exactly_once(curve),
            "parts": [done.describe() for done in curve.parts],
        }
        print(
            f"{name}: {result['kills']} kills, {torn} damaged checkpoints, "
            f"{result['plans']} plans; losses differ by at most {max(by_epoch):.2e}, "
            f"weights by {weights:.2e} (tolerance {tolerance:.2e}); bitwise: {exact}; "
            f"samples exactly once: {result['samples_exactly_once']}",
            flush=True,
        )
        return result


def holds(result: dict[str, Any]) -> bool:
    """Tell whether a run is the one that nobody interrupted."""
    worst = max(*result["difference_by_epoch"], result["weights_difference"])
    within: bool = worst <= result["tolerance"]
    return within and result["samples_exactly_once"]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; return the results by system, and the growth.

    Raises:
        RunFailed: a part ended otherwise than it should.
    """
    experiment = Experiment(args, folder)
    whole = experiment.undisturbed("whole", 1, 1)
    growth = experiment.growth("whole", whole)
    steps = args.epochs * STEPS
    tolerance = growth * steps * ROUNDINGS * 2.0**-53
    print(f"growth {growth:.3g} over {steps} steps: tolerance {tolerance:.2e}")
    other = experiment.killed(OTHER, args.kills, None)
    results = {OTHER: experiment.compare(OTHER, other, "whole", whole, tolerance)}
    world, stages = SAME_PLAN
    replicas = experiment.undisturbed("replicas", world, stages, cache=False)
    same = experiment.killed(SAME, args.same_kills, SAME_PLAN)
    results[SAME] = experiment.compare(SAME, same, "replicas", replicas, 0.0)
    return {"growth": growth, "steps": steps, "systems": results}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server("faults.kills_worker")
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = run(args, Path(folder))
    except RunFailed as failure:
        print(f"failed: {failure}")
        return 1
    if args.json is not None:
        rows = [
            Row(
                system,
                "difference of the losses",
                "1",
                tuple(result["difference_by_epoch"]),
                values_of="epochs of one run",
                target=Target(result["tolerance"], of="max"),
            )
            for system, result in results["systems"].items()
        ]
        name = "kills_and_resumes"
        extra = {"restarts": results, "load_average": os.getloadavg()}
        write_json(args.json, name, rows, [], start=start, quick=args.quick, **extra)
    return int(not all(map(holds, results["systems"].values())))


if __name__ == "__main__":
    sys.exit(main())
