"""Tables and bar charts in plain ASCII, for a benchmark's own output."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [list(headers), *map(list, rows)]
    for line in lines:
        if len(line) != len(headers):
            raise ValueError(f"row: expected {len(headers)} cells, got {line}")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def bar_chart(
    bars: Sequence[tuple[str, float]], *, unit: str = "", width: int = 40
) -> str:
    """One line of ``#`` per bar; the largest value is ``width`` characters long.

    Args:
        bars: Label and value >= 0, from top to bottom.
        unit: Follows each value.
        width: Characters.
    """
    for label, value in bars:
        if not value >= 0:
            raise ValueError(f"bar {label}: expected a value >= 0, got {value}")
    label_width = max((len(label) for label, _ in bars), default=0)
    largest = max((value for _, value in bars), default=0.0)
    lines = []
    for label, value in bars:
        bar = "#" * round(width * value / largest) if largest else ""
        lines.append(f"{label:<{label_width}} |{bar:<{width}} {value:.4g} {unit}")
    return "\n".join(line.rstrip() for line in lines)
