r"""Do transformations change training? Loss curves with and without them.

python benchmarks/transformation_curve.py \
    --json benchmarks/results/transformation_curve.json

A run of four processes goes through 4x1, 3x1, 2x2, 1x4, 2x2, 3x1 and 4x1 stages x
replicas as it freezes and unfreezes; a run of one process has the same freezes and one
static plan. Float64, no dropout: loss after loss they may differ by rounding alone.
How much that is, is measured, not guessed: the static run once more with every initial
weight off by one unit in its last place. The elastic run in float32 shows what is
promised bit by bit around each change. The status is 1 if a promise is broken
(METRICS.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.forked import fork_server
from harness.provenance import begin
from harness.results import write_json
from transformations.curve_runs import CurveRun, Job, run_job

# Units frozen per epoch, of 12: K is forced to 4, or to the layers left to train.
FREEZES = (0, 10, 11, 12, 11, 10, 0)
SHAPES = ["4x1", "3x1", "2x2", "1x4", "2x2", "3x1", "4x1"]
QUICK_FREEZES = (0, 4, 0)
QUICK_SHAPES = ["2x1", "1x2", "2x1"]
MARGIN = 10.0  # times what one unit in the last place does
LEAST = 1e-15  # a few units in the last place of a loss near one


def distance(run: CurveRun, other: CurveRun) -> dict[str, float]:
    """Return the largest relative difference of losses, and of weights."""
    tests = [x for pair in run.evaluations for x in pair]
    others = [x for pair in other.evaluations for x in pair]
    return {
        "training loss": _relative(run.losses, other.losses),
        "test loss": _relative(tests, others),
        "weights": max(
            float((a.double() - b.double()).abs().max())
            for a, b in zip(run.weights, other.weights, strict=True)
        ),
    }


def _relative(values: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, others, strict=True))


def broken_bits(run: CurveRun) -> list[str]:
    """Say what is not bit by bit the same before and after each change."""
    found = []
    for epoch in range(1, len(run.shapes)):
        change = f"{run.shapes[epoch - 1]} -> {run.shapes[epoch]}"
        if run.evaluations[epoch - 1][1] != run.evaluations[epoch][0]:
            found.append(f"{change}: test loss")
        ends = [end for _, end in run.states[epoch - 1].values()]
        begins = [begin for begin, _ in run.states[epoch].values()]
        for what in ("weights", "moments", "rates"):
            if len({state[what] for state in (*ends, *begins)}) != 1:
                found.append(f"{change}: {what}")
    return found


def broken_samples(run: CurveRun, other: CurveRun, samples: int) -> list[str]:
    """Say where a sample was not seen once in an epoch, or in another batch."""
    found = [
        f"epoch {epoch}: {len(ids)} samples, {len(set(ids))} different"
        for epoch, ids in enumerate(run.ids)
        if sorted(ids) != list(range(samples))
    ]
    pairs = enumerate(zip(run.step_ids, other.step_ids, strict=True))
    return found + [f"step {n}: other samples" for n, (a, b) in pairs if a != b]


def judge(
    elastic: CurveRun, static: CurveRun, control: CurveRun, single: CurveRun, job: Job
) -> dict[str, Any]:
    """Return what was compared and what is not as promised."""
    off, least = distance(elastic, static), distance(control, static)
    allowed = {what: max(LEAST, found) for what, found in least.items()}
    problems = [
        f"{what}: {off[what]:.3g} from the static run, allowed {MARGIN * bound:.3g}"
        for what, bound in allowed.items()
        if off[what] > MARGIN * bound
    ]
    problems += [f"float32, {text}" for text in broken_bits(single)]
    problems += [f"float64, {text}" for text in broken_bits(elastic)]
    problems += broken_samples(elastic, static, job.samples)
    problems += broken_samples(single, static, job.samples)
    return {
        "shapes": elastic.shapes,
        "steps": len(elastic.losses),
        "difference": off,
        "one_unit_in_the_last_place": least,
        "margin": MARGIN,
        "changes_bitwise": len(single.shapes) - 1,
        "problems": problems,
    }


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="2 processes, a tiny model, 2 changes")
    add("--samples", type=int, default=1078, help="of the training set")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server(
        "transformations.curve_runs", "sklearn.datasets", "sklearn.model_selection"
    )
    job, shapes = Job(4, FREEZES, args.samples, double=True), SHAPES
    if args.quick:
        job = Job(2, QUICK_FREEZES, 96, double=True, blocks=4, width=16)
        shapes = QUICK_SHAPES
    alone = dataclasses.replace(job, world_size=1)
    elastic, static = run_job(job), run_job(alone)
    control = run_job(dataclasses.replace(alone, nudge=True))
    single = run_job(dataclasses.replace(job, double=False))
    found = judge(elastic, static, control, single, job)
    for run in (elastic, single):
        if run.shapes != shapes:
            found["problems"].append(f"expected plans {shapes}, got {run.shapes}")
    print(f"plans {' '.join(found['shapes'])}, {found['steps']} steps")
    for what, value in found["difference"].items():
        least = found["one_unit_in_the_last_place"][what]
        print(f"{what}: off by {value:.3g}; one unit in the last place {least:.3g}")
    print("\n".join(found["problems"]) or "every promise was kept")
    if args.json is not None:
        curves = {"elastic": elastic.losses, "static": static.losses}
        tests = {"elastic": elastic.evaluations, "static": static.evaluations}
        write_json(
            args.json,
            "transformation_curve",
            [],
            [],
            start=start,
            quick=args.quick or args.samples < 1078,
            **found,
            training_loss=curves,
            test_loss=tests,
        )
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
