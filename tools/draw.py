#!/usr/bin/env python3
"""Draws the documents' pictures, and checks that the committed ones are these.

Usage: ``python tools/draw.py`` writes docs/img/run.svg and docs/img/rooms.svg; with
``--check`` nothing is written, and the status is 1 if one of them differs. Nothing is
drawn by hand: a run comes from docs/img/run.json, which ``--run SUMMARY`` makes of the
summary of a run that has just ended (``make demo``: runs/demo/summary.json) and stamps
with the commit; the rooms come from the table in tools/check_layers.py. Needs nothing
but the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _room_graph
import _run_timeline

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness.machine import machine  # noqa: E402
from harness.provenance import tree_of  # noqa: E402

IMAGES = Path("docs/img")
RUN = IMAGES / "run.json"
EPOCH_FIELDS = (
    "epoch",
    "boundary",
    "num_stages",
    "num_replicas",
    "seconds",
    "elapsed_seconds",
)


def pictures(root: Path) -> dict[Path, Callable[[], str]]:
    """What is drawn, by file."""
    return {
        root / IMAGES / "run.svg": lambda: _run_timeline.draw(
            json.loads((root / RUN).read_text())
        ),
        root / IMAGES / "rooms.svg": _room_graph.draw,
    }


def reduced(summary: dict[str, Any], command: str, num_layers: int) -> dict[str, Any]:
    """What the drawing shows of a run, and where it comes from.

    Raises:
        ValueError: the tree differs from its commit.
    """
    tree = tree_of(ROOT)
    if tree.commit is None or tree.changed:
        found = ", ".join(tree.changed) or "no git checkout"
        raise ValueError(f"run: expected a clean tree, got {found}")
    where = machine()
    return {
        "command": command,
        "commit": tree.commit,
        "date": datetime.date.today().isoformat(),
        "machine": {key: where[key] for key in ("cpu", "cores", "torch")},
        "num_layers": num_layers,
        "world_size": summary["world_size"],
        "total_seconds": round(summary["total_seconds"], 3),
        "epochs": [
            {key: _rounded(each[key]) for key in EPOCH_FIELDS}
            for each in summary["epochs"]
        ],
        "pauses": [
            {"epoch": each["epoch"], "seconds": _rounded(each["pause_seconds"])}
            for each in summary["transformations"]
        ],
    }


def _rounded(value: float) -> float:
    return round(value, 3) if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Write or check the drawings; 1 if one of them differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing")
    add("--run", type=Path, metavar="SUMMARY", help="draw this run from now on")
    add("--command", default="make demo", help="that made the run")
    add("--num-layers", type=int, default=14, help="of the run's model")
    args = parser.parse_args(arguments)
    if args.run is not None:
        summary = json.loads(args.run.read_text())
        content = reduced(summary, args.command, args.num_layers)
        (root / RUN).write_text(json.dumps(content, indent=1) + "\n")
    differs = False
    for path, draw in pictures(root).items():
        text = draw()
        if path.exists() and path.read_text() == text:
            continue
        differs = True
        if args.check:
            print(f"{path}: expected what tools/draw.py draws, got something else")
        else:
            path.write_text(text)
            print(f"{path} written")
    return int(args.check and differs)


if __name__ == "__main__":
    sys.exit(main())
