"""Draws a document as plain text."""

from __future__ import annotations

from collections.abc import Iterable

from pipetransformer.explanation.document import Section, Table


def render(document: Iterable[Section]) -> str:
    """Return the sections as lines; titles are underlined, tables aligned."""
    return "\n\n".join("\n".join(_section(section)) for section in document)


def _section(section: Section) -> list[str]:
    lines = [section.title, "-" * len(section.title)] if section.title else []
    lines.extend(section.lines)
    if section.table is not None:
        lines.extend(_table(section.table))
    return lines


def _table(table: Table) -> list[str]:
    rows = [tuple(table.headings()), *table.rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if table.is_words(i) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    if table.marked is not None:
        lines = [("  " if i != table.marked + 1 else "> ") + x for i, x in enumerate(lines)]
    return lines
