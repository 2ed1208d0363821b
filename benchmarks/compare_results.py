"""How far two result files of the same benchmark differ.

python benchmarks/compare_results.py FIRST.json SECOND.json

Prints each ratio and each row of both files and the difference in percent of the
first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from harness.text import text_table


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[list[str]]:
    """Return one line per ratio and row that both files have.

    Raises:
        ValueError: the files are of different benchmarks, or share no figure.
    """
    if first["name"] != second["name"]:
        raise ValueError(
            f"results: expected one benchmark, got {first['name']} and {second['name']}"
        )
    left, right = _figures(first), _figures(second)
    lines = [
        [name, f"{left[name]:.4g}", f"{right[name]:.4g}", _percent(name, left, right)]
        for name in left
        if name in right
    ]
    if not lines:
        raise ValueError("results: expected common figures, got none")
    return lines


def _figures(content: dict[str, Any]) -> dict[str, float]:
    figures = {ratio["name"]: ratio["value"] for ratio in content["ratios"]}
    for row in content["rows"]:
        if row["median"] is not None:
            figures[f"{row['system']}, {row['metric']} ({row['unit']})"] = row["median"]
    return figures


def _percent(name: str, left: dict[str, float], right: dict[str, float]) -> str:
    if left[name] == 0:
        return "-"
    return f"{100 * (right[name] / left[name] - 1):+.1f} %"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    first, second = (json.loads(p.read_text()) for p in (args.first, args.second))
    try:
        lines = differences(first, second)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(text_table(["figure", "first", "second", "difference"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
