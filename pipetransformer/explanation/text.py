"""Draws a document as plain text."""

from __future__ import annotations

from collections.abc import Iterable

from pipetransformer.core.text_columns import aligned
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
    rows = [tuple(column.name for column in table.columns), *table.rows]
    left = {i for i, column in enumerate(table.columns) if column.kind != "number"}
    lines = aligned(rows, left=left)
    if table.marked is not None:
        lines = [
            ("  " if i != table.marked + 1 else "> ") + x for i, x in enumerate(lines)
        ]
    return lines
