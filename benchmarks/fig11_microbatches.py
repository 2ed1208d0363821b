"""Figure 11: how many micro-batches a pipeline should have, and the planner's choice.

python benchmarks/fig11_microbatches.py --json OUT.json

An encoder trains on one batch, cut into the numbers of micro-batches M that the planner
tries, K to 6K, on one and two CPU slots under GPipe. Each M is measured and simulated,
and the planner chooses one for each K from the same profiles, taken on K slots at once.
Profiling and all M take turns. Must: the step of the planner's choice within 3 % of the
best measured one. The paper's figure 11, K = 8 on GPUs, stands alongside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import torch

from harness.common import (
    Ratio,
    Row,
    Target,
    add_common_arguments,
    begin,
    compared,
    write_json,
)
from harness.quiet import add_patience_argument
from harness.text import text_table
from pipe.encoder import Shape, batch, encoder, mean_loss
from pipetransformer import planner
from pipetransformer.config import PlanConfig
from pipetransformer.planner import Profile
from simulated.slot_profile import profile_on_slots
from simulated.steps import Case, median_profile, slots
from simulated.trials import Compared, Subject, Trial

AIM = 0.03
FACTORS = (1, 2, 3, 4, 5, 6)  # M over K
# Per repeat; the first one after another system's turn finds no memory of its own.
STEPS = 3
SHAPE = Shape(tokens=64)
QUICK_SHAPE = Shape(blocks=4, tokens=32, rows=16)
# Samples per second at K = 8 on 8 GPUs by M over K, and the best M over K by K.
PAPER = dict(zip(FACTORS, (368, 410, 386, 340, 298, 286), strict=True))
PAPER_BEST = {8: 2, 4: 4, 2: 8}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=9)
    add_patience_argument(parser)
    add = parser.add_argument
    add("--slots", type=int, nargs="+", default=[1, 2], metavar="K")
    add(
        "--profile-sizes",
        type=int,
        nargs="+",
        default=list(PlanConfig().microbatch_samples),
        metavar="ROWS",
        help="micro-batch sizes that are profiled; default: the engine's",
    )
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    return args


def counts_of(num_stages: int, rows: int) -> list[int]:
    """Return K to 6K, as far as there are rows."""
    return [f * num_stages for f in FACTORS if f * num_stages <= rows]


def cuts_of(shape: Shape, num_stages: int) -> tuple[int, ...]:
    """Return the borders of equal stages."""
    return tuple(shape.blocks * j // num_stages for j in range(num_stages + 1))


def subject_of(args: argparse.Namespace, shape: Shape, num_stages: int) -> Subject:
    """Return the encoder with a case for each M, profiled on K slots at once."""
    inputs, targets = batch(shape, args.seed)
    models = [encoder(shape, args.seed) for _ in range(num_stages)]
    return Subject(
        name="encoder",
        kind="encoder",
        model=lambda: encoder(shape, args.seed),
        inputs=inputs,
        targets=targets,
        loss=mean_loss,
        cases=tuple(
            Case(cuts_of(shape, num_stages), count, "gpipe")
            for count in counts_of(num_stages, shape.rows)
        ),
        alone=lambda: profile_on_slots(models, inputs, args.profile_sizes),
        steps=1 if args.quick else STEPS,
    )


def choice(profile: Profile, shape: Shape, num_stages: int) -> int:
    """Return the M that the planner chooses for K stages."""
    return planner.search(
        profile,
        slots(num_stages),
        global_batch=shape.rows,
        cuts=cuts_of(shape, num_stages),
    ).num_microbatches


def best_of(found: Sequence[Compared], num_stages: int) -> int:
    """Return the M with the shortest measured step; 0 if none was measured."""
    times = {
        each.case.num_microbatches: each.measured.median
        for each in found
        if each.case.num_stages == num_stages and each.measured.values
    }
    return min(times, key=lambda count: times[count], default=0)


def choice_ratios(
    found: Sequence[Compared], chosen: Mapping[int, int], *, quick: bool
) -> list[Ratio]:
    """Return, for each K, the step of the planner's M over that of the best one."""
    rows = {
        (each.case.num_stages, each.case.num_microbatches): each.measured
        for each in found
    }
    ratios = []
    for length, count in chosen.items():
        best = best_of(found, length)
        if (length, best) in rows and (length, count) in rows:
            ratios += compared(
                f"K={length}: planner's M={count} / best M={best}",
                rows[length, count],
                rows[length, best],
                better_than=rows[length, best].system,
                quick=quick,
                target=Target(1 + AIM, of="value"),
            )
    return ratios


def print_table(
    found: Sequence[Compared], chosen: Mapping[int, int], batch_rows: int
) -> None:
    """Print one line per K and M."""
    lines = []
    for each in found:
        length, count = each.case.num_stages, each.case.num_microbatches
        marks = ["best"] if count == best_of(found, length) else []
        marks += ["planner's choice"] if count == chosen[length] else []
        row, simulated = each.measured, each.simulated
        both = bool(row.values and simulated.values)
        lines.append(
            [
                f"K={length} M={count}",
                f"{row.median:.4f}" if row.values else "failed",
                f"{simulated.median:.4f}" if simulated.values else "failed",
                f"{simulated.median / row.median - 1:+.1%}" if both else "-",
                f"{batch_rows / row.median:.1f}" if row.values else "-",
                str(PAPER[count // length]),
                ", ".join(marks),
            ]
        )
    headers = ["", "step s", "simulated s", "off by", "samples/s"]
    print(text_table([*headers, "paper's, K=8, same M/K", ""], lines))


def main() -> int:
    args = parse_args()
    start = begin()
    torch.set_num_threads(1)
    shape = QUICK_SHAPE if args.quick else SHAPE
    found: list[Compared] = []
    chosen: dict[int, int] = {}
    for length in args.slots:
        subject = subject_of(args, shape, length)
        trial = Trial(subject, repeats=args.repeats, patience_s=args.patience)
        found += trial.run()
        chosen[length] = choice(median_profile(trial.profiles), shape, length)
    ratios = choice_ratios(found, chosen, quick=args.quick)
    print_table(found, chosen, shape.rows)
    for ratio in ratios:
        verdict = "met" if ratio.value <= 1 + AIM else "missed"
        print(f"{ratio.name}: {ratio.value:.3f} (aim {1 + AIM:.2f}): {verdict}")
    print(f"paper's best M/K by K: {PAPER_BEST}")
    rows: list[Row] = [row for each in found for row in (each.measured, each.simulated)]
    if args.json is not None:
        write_json(
            args.json,
            "fig11_microbatches",
            rows,
            ratios,
            start=start,
            quick=args.quick,
            seed=args.seed,
            shape=vars(shape),
            profile_sizes=args.profile_sizes,
            cases={
                each.measured.system: {
                    "num_stages": each.case.num_stages,
                    "num_microbatches": each.case.num_microbatches,
                }
                for each in found
            },
            chosen={str(length): count for length, count in chosen.items()},
            best={str(length): best_of(found, length) for length in chosen},
            published={"samples_per_s": PAPER, "best_factor": PAPER_BEST},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
