"""Text in columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (), rule: bool = False
) -> list[str]:
    """Return a line per row, its cells two spaces apart.

    Args:
        rows: cells, as many in each; the first row has the names.
        left: columns that begin at the left; the others end at the right.
        rule: whether a line of dashes follows the names.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    drawn = [list(row) for row in rows]
    if rule:
        drawn.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in drawn
    ]
