"""Compares an elastic run with its static baseline, from the files both wrote.

python examples/compare_runs.py --out runs/demo
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Summary = dict[str, Any]

SUPPORTED_VERSION = 1


def load_summary(path: Path) -> Summary:
    """Return the run's summary.

    Raises:
        ValueError: the file is of another format version, or has no accuracy.
    """
    summary: Summary = json.loads(path.read_text())
    version = summary.get("version")
    if version != SUPPORTED_VERSION:
        raise ValueError(f"{path}: expected version {SUPPORTED_VERSION}, got {version}")
    if summary["final_accuracy"] is None:
        raise ValueError(f"{path}: expected a final_accuracy, got None")
    return summary


def shapes(summary: Summary) -> str:
    """Return the plans in order, each once: ``4x1 -> 2x2 -> 1x4``."""
    found: list[str] = []
    for epoch in summary["epochs"]:
        shape = f"{epoch['num_stages']}x{epoch['num_replicas']}"
        if found[-1:] != [shape]:
            found.append(shape)
    return " -> ".join(found)


def total(field: str) -> Callable[[Summary], str]:
    """Return a function that adds up `field` over the epochs of a summary."""
    return lambda summary: str(sum(epoch[field] for epoch in summary["epochs"]))


ROWS: list[tuple[str, Callable[[Summary], str]]] = [
    ("stages x replicas", shapes),
    ("frozen units at the end", lambda s: str(s["epochs"][-1]["num_frozen_layers"])),
    ("transformations", lambda s: str(len(s["transformations"]))),
    ("optimizer steps", total("optimizer_steps")),
    ("samples", total("samples")),
    ("cache hits", total("cache_hits")),
    ("seconds", lambda s: f"{s['total_seconds']:.1f}"),
    ("test accuracy", lambda s: f"{s['final_accuracy']:.2%}"),
]


def comparison(elastic: Summary, static: Summary) -> str:
    """Return a table of both runs and one line with their differences."""
    cells = [("", "elastic", "static")]
    cells += [(name, value(elastic), value(static)) for name, value in ROWS]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{name:<{widths[0]}}  {left:>{widths[1]}}  {right:>{widths[2]}}"
        for name, left, right in cells
    ]
    speedup = static["total_seconds"] / elastic["total_seconds"]
    points = 100 * (elastic["final_accuracy"] - static["final_accuracy"])
    lines.append(
        f"time: static / elastic = {speedup:.2f}; "
        f"accuracy: elastic - static = {points:+.2f} points\n"
        "one pair of runs judges no accuracy: make seeds tests five (margin 0.3 points)"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    folder = parser.parse_args().out
    elastic, static = folder / "summary.json", folder / "baseline.json"
    print(comparison(load_summary(elastic), load_summary(static)))
    print(f"files: {elastic}, {static}")


if __name__ == "__main__":
    main()
