"""Table of the paper's ladder."""

from __future__ import annotations

import sys
from pathlib import Path

from _markdown import Content, markdown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from simulated.simulator_error import simulator_error  # noqa: E402

ABSENT = "-"


def ladder(content: Content) -> list[str]:
    """Each configuration, what was expected of it and what the paper measured."""
    lines = []
    for row in content["ladder"]:
        expected = row["expected"]
        lines.append(
            [
                row["name"],
                row["section"],
                f"{row['simulated']:.2f}",
                f"{expected:.2f}" if expected else ABSENT,
                f"{round(100 * row['off'], 1) + 0.0:+.1f} %" if expected else ABSENT,
                beside_the_paper(row),
            ]
        )
    headers = ["configuration", "instance", "simulated", "expected", "off"]
    error = simulator_error(Path(content["folder"]))
    note = (
        f"Simulated, not measured; {error}. By formula, no "
        f"bubbles and free cache reads: {content['closed_forms']['bound']:.2f}. *off* "
        "is from *expected*, an earlier calculation of the same kind, not from the "
        "paper; static K=8 with best M agrees with it by construction, since the "
        "overhead per micro-batch was chosen so."
    )
    return [*markdown([*headers, "paper (simulated, off it)"], lines), "", note]


def beside_the_paper(row: Content) -> str:
    """What the paper measured, and how far the simulation is from that."""
    if not row["paper"]:
        return ABSENT
    off = round(100 * (row["simulated"] / row["paper"] - 1)) + 0.0
    return f"{row['paper']:.2f} ({off:+.0f} %)"
