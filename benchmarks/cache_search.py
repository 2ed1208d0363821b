"""What kept activations do for a search: ten runs on one frozen prefix.

python benchmarks/cache_search.py --json benchmarks/results/cache_search.json

MiniLM (BERT, 6 layers) with its embeddings and first four blocks frozen learns SST-2 in
ten runs, each with another head and learning rate: one process per run, as a search
starts them. ``kept`` runs share ``CacheConfig(directory=...)``, the first of them finds
it empty; ``within a run`` caches, but keeps nothing; ``recomputed`` runs the frozen
blocks for every batch. A run's time is that of its passes, without start and
evaluation; the frozen forwards are the samples that were not found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.common import Row, Target, begin, run_child, write_json
from harness.text import text_table
from real_models import ROOT, unpack_model

WORKER = Path(__file__).parent / "training/search_worker.py"
SYSTEMS = ("kept", "within a run", "recomputed")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="a slice; not for publication")
    add("--data", type=Path, default=ROOT.parent / "shared" / "data")
    add("--runs", type=int, default=10)
    add("--epochs", type=int, default=2)
    add("--samples", type=int, default=256, help="the first sentences of the set")
    args = parser.parse_args(arguments)
    if args.quick:
        args.runs, args.samples = 2, 64
    return args


def run(
    args: argparse.Namespace, system: str, number: int, model: Path, folder: Path
) -> dict[str, Any]:
    """Return seconds, samples that were found and that were not, and the loss."""
    name = f"{system.replace(' ', '-')}-{number}"
    out = folder / f"{name}.json"
    line = [sys.executable, str(WORKER), "--model", str(model)]
    line += ["--data", str(args.data / "sst2"), "--out", str(out)]
    line += ["--samples", str(args.samples), "--epochs", str(args.epochs)]
    line += ["--head", str(number), "--lr", str(RATES[number % len(RATES)])]
    line += {
        "kept": ["--directory", str(folder / "kept")],
        "within a run": [],
        "recomputed": ["--no-cache"],
    }[system]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run_child(line, timeout_s=1800, log=folder / f"{name}.log", env=env)
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as name:
        model = unpack_model(Path(name) / "model")
        for number in range(args.runs):
            for system in SYSTEMS:
                found[system].append(run(args, system, number, model, Path(name)))
    rows, lines = [], []
    for system, runs in found.items():
        seconds = tuple(each["seconds"] for each in runs)
        forwards = sum(each["misses"] for each in runs)
        rows += [
            Row(system, "time of a run's passes", "s", seconds),
            Row(system, "time of all", "s", (sum(seconds),), values_of="searches"),
            Row(
                system,
                "frozen forwards of all",
                "samples",
                (float(forwards),),
                values_of="searches",
                # Once per sample, whatever the number of runs.
                target=Target(args.samples) if system == "kept" else None,
            ),
        ]
        lines.append(
            [system, f"{sum(seconds):.1f}", f"{seconds[0]:.1f}", str(forwards)]
        )
    equal = all(
        abs(kept["loss"] - plain["loss"]) <= 1e-4 * abs(plain["loss"])
        for kept, plain in zip(found["kept"], found["recomputed"], strict=True)
    )
    print(text_table(["system", "s of all", "s of the first", "forwards"], lines))
    print(f"losses of kept and recomputed runs are equal to 1e-4: {equal}")
    if args.json is not None:
        write_json(
            args.json,
            "cache_search",
            rows,
            [],
            start=start,
            quick=args.quick,
            runs=args.runs,
            samples=args.samples,
            epochs=args.epochs,
            losses_equal=equal,
        )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
