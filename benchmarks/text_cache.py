"""What the activation cache does for text that is padded to the longest of its batch.

python benchmarks/text_cache.py --json benchmarks/results/text_cache.json

MiniLM (BERT, 6 layers, 22.7 M parameters) learns SST-2 for four epochs on two processes
with ``AlphaCap(alpha=1/3, gradient_term=False)``: "cached" and "recomputed" (frozen
layers run for every batch). "padded" is what a record takes with all positions of the
longest sentence.

* **Hits**: from the second epoch at a boundary on all samples hit; where the boundary
  has moved, records of the boundary before count, which go through the newly frozen
  layers once.
* **Time**: an epoch is expected to take the share of the first, unfrozen one that its
  floating-point operations are: 3 for an active block (forward, and backward twice as
  much), 1 for a frozen one that is run, 0 for one that is cached. Embeddings and head
  count nothing. **Aim**: at most 15 % above that. The first epoch at a first boundary
  runs the frozen blocks once for each sample, to store them.
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

import torch
from transformers import AutoTokenizer

from harness.common import Row, Target, begin, run_child, write_json
from harness.text import text_table
from pipetransformer.autocache import record_bytes
from real_models import ROOT, WORKER, unpack_model

sys.path.insert(0, str(ROOT / "examples"))
import text_classification as sst2

BLOCKS, WIDTH = 6, 384
ACTIVE, RUN = 3.0, 1.0  # operations of a block, in those of its forward
AIM = 1.15
SYSTEMS: dict[str, tuple[str, ...]] = {
    "cached": (),
    "recomputed": ("--no-cache",),
}


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="a slice; not for publication")
    add("--data", type=Path, default=ROOT.parent / "shared" / "data")
    add("--epochs", type=int, default=4)
    add("--samples", type=int, default=2048, help="the first sentences of the set")
    args = parser.parse_args(arguments)
    if args.quick:
        args.samples = 96
    return args


def run(
    args: argparse.Namespace, system: str, model: Path, folder: Path
) -> dict[str, Any]:
    """Return what the worker's lead has found."""
    out = folder / f"{system}.json"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node=2", str(WORKER), "--task", "sst2", "--system"]
    line += ["freezing", "--model", str(model), "--data", str(args.data)]
    line += ["--epochs", str(args.epochs), "--samples", str(args.samples)]
    line += ["--out", str(out), *SYSTEMS[system]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run_child(line, timeout_s=7200, log=folder / f"{system}.log", env=env)
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def padded_bytes(args: argparse.Namespace, model: Path) -> int:
    """Return what a record takes with as many positions as the longest sentence."""
    rows = sst2.read("train", args.data / "sst2")[: args.samples]
    sentences = sst2.Sentences(AutoTokenizer.from_pretrained(model), rows)
    longest = max(len(row["input_ids"]) for row in sentences.rows)
    hidden, mask = torch.zeros(1, longest, WIDTH), torch.zeros(1, 1, 1, longest)
    return record_bytes([hidden, mask])


def frozen_blocks(epoch: dict[str, Any]) -> int:
    """Return how many blocks were frozen in an epoch; layer 0 holds embeddings."""
    return max(0, int(epoch["num_frozen_layers"]) - 1)


def expected(epochs: Sequence[dict[str, Any]], *, cached: bool) -> list[float]:
    """Return each epoch's operations over those of one without frozen blocks."""
    shares, held = [], 0
    for epoch in epochs:
        frozen = frozen_blocks(epoch)
        runs = max(0, frozen - held) if cached else frozen
        active = BLOCKS - frozen
        shares.append((active * ACTIVE + runs * RUN) / (BLOCKS * ACTIVE))
        held = frozen
    return shares


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    with tempfile.TemporaryDirectory() as name:
        model = unpack_model(Path(name) / "model")
        found = {system: run(args, system, model, Path(name)) for system in SYSTEMS}
        padded = padded_bytes(args, model)
    rows, lines = [], []
    for system in ("cached", "recomputed"):
        epochs = found[system]["epochs"]
        shares = expected(epochs, cached=system == "cached")
        whole = epochs[0]["seconds"]
        for epoch, share in zip(epochs, shares, strict=True):
            of_first = epoch["seconds"] / whole
            rows.append(
                Row(
                    f"{system}, epoch {epoch['epoch']}",
                    f"time over the first epoch's, over operations ({share:.2f})",
                    "times",
                    (of_first / share,),
                    values_of="runs",
                    target=Target(AIM) if system == "cached" else None,
                )
            )
            asked = epoch["cache_hits"] + epoch["cache_misses"]
            lines.append(
                [
                    system,
                    str(epoch["epoch"]),
                    str(frozen_blocks(epoch)),
                    f"{epoch['cache_hits']}/{asked}" if asked else "-",
                    f"{epoch['cache'].get('bytes', 0) / 1e6:.1f}",
                    f"{epoch['seconds']:.1f}",
                    f"{of_first:.2f}",
                    f"{share:.2f}",
                ]
            )
    rows += _hits(found["cached"]["epochs"])
    last = found["cached"]["epochs"][-1]
    per_sample = {"cached": last["cache"]["bytes"] / last["samples"], "padded": padded}
    for system, each in per_sample.items():
        rows.append(Row(system, "stored for a sample", "B", (each,), values_of="runs"))
    header = ["system", "epoch", "frozen", "hits", "MB", "s", "of the first", "ops"]
    print(text_table(header, lines))
    print({name: f"{each:.0f} B a sample" for name, each in per_sample.items()})
    if args.json is not None:
        write_json(
            args.json,
            "text_cache",
            rows,
            [],
            start=start,
            quick=args.quick,
            epochs=found["cached"]["epochs"],
            samples=args.samples,
        )
    return 0


def _hits(epochs: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the share of hits of each epoch behind the first with frozen blocks."""
    rows, seen = [], False
    for epoch in epochs:
        asked = epoch["cache_hits"] + epoch["cache_misses"]
        if asked and seen:
            share = 100 * epoch["cache_hits"] / asked
            rows.append(
                Row(
                    f"cached, epoch {epoch['epoch']}",
                    "hits",
                    "%",
                    (share,),
                    values_of="runs",
                    target=Target(100, at_least=True),
                )
            )
        seen = seen or bool(asked)
    return rows


if __name__ == "__main__":
    sys.exit(main())
