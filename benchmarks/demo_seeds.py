"""Accuracy of the demo with and without freezing, over paired seeds.

python benchmarks/demo_seeds.py --json benchmarks/results/demo_seeds.json

Each seed gives one elastic and one static, unfrozen run of
``examples/finetune_vit.py``: same head, same batches, same number of steps. Prints
one line per seed and the paired test of METRICS.md; ends with status 1 if it fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from harness.common import (
    Repeat,
    Row,
    add_common_arguments,
    begin,
    run_child,
    seeds_of,
    write_json,
)
from harness.paired import non_inferiority

SCRIPT = Path(__file__).parents[1] / "examples" / "finetune_vit.py"
ELASTIC, STATIC = "elastic", "static"
ACCURACY = "final accuracy"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    add = parser.add_argument
    add("--processes", type=int, default=4)
    add("--timeout", type=float, default=600.0, help="seconds per run")
    add("--out", type=Path, default=Path("runs/seeds"), metavar="DIR")
    args = parser.parse_args()
    args.seeds = seeds_of(args)
    if args.quick:
        args.seeds = args.seeds[:2]
    if len(args.seeds) < 2:
        parser.error(f"--seeds: expected at least 2, got {len(args.seeds)}")
    return args


def run(args: argparse.Namespace, system: str, seed: int) -> Repeat:
    """Run the demo once.

    Raises:
        RunFailed: the run failed or took longer than ``--timeout``.
    """
    name = f"seed{seed}-{system}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.processes}", str(SCRIPT)]
    command += [f"--seed={seed}", f"--out={args.out}", f"--name={name}"]
    if system == STATIC:
        command += ["--no-freeze", f"--static={args.processes}"]
    if args.quick:
        command.append("--epochs=2")
    sample = run_child(
        command,
        timeout_s=args.timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        log=args.out / f"{name}.log",
    )
    summary = json.loads((args.out / f"{name}.json").read_text())
    return Repeat(sample, {ACCURACY: 100.0 * float(summary["final_accuracy"])})


def main() -> int:
    args = parse_args()
    start = begin()
    accuracies: dict[str, list[float]] = {ELASTIC: [], STATIC: []}
    print("seed  elastic  static  difference (points)")
    for seed in args.seeds:
        for system, values in accuracies.items():
            values.append(run(args, system, seed).metrics[ACCURACY])
        elastic, static = accuracies[ELASTIC][-1], accuracies[STATIC][-1]
        print(
            f"{seed:4}  {elastic:7.2f}  {static:6.2f}  {elastic - static:+.2f}",
            flush=True,
        )
    test = non_inferiority(accuracies[ELASTIC], accuracies[STATIC])
    print(f"{ELASTIC} - {STATIC}: {test}")
    if args.json is not None:
        rows = [
            Row(system, ACCURACY, "%", tuple(values))
            for system, values in accuracies.items()
        ]
        extra = {"seeds": args.seeds, "accuracy": {ELASTIC: test.to_json()}}
        write_json(
            args.json, "demo_seeds", rows, [], start=start, quick=args.quick, **extra
        )
    return int(not test.passes)


if __name__ == "__main__":
    sys.exit(main())
