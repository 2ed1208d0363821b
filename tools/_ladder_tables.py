"""Table of the paper's ladder."""

from __future__ import annotations

from _markdown import Content, markdown

ABSENT = "-"


def ladder(content: Content) -> list[str]:
    """Each configuration beside what was expected of it and what the paper measured."""
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
                f"{row['paper']:.2f}" if row["paper"] else ABSENT,
            ]
        )
    headers = ["configuration", "instance", "simulated", "expected", "off", "paper"]
    note = (
        f"Simulated, not measured; {content['simulator_error']}. By formula, no "
        f"bubbles and free cache reads: {content['closed_forms']['bound']:.2f}."
    )
    return [*markdown(headers, lines), "", note]
