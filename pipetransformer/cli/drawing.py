"""Draws the sections of a report on a rich console."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from pipetransformer.explanation import Section, Table


def draw(console: Console, document: Iterable[Section]) -> None:
    """Print the sections: bold titles, sentences, tables as wide as the console."""
    for section in document:
        if not section.lines and section.table is None:
            continue
        if section.title:
            console.print(f"\n{section.title}", style="bold")
        for line in section.lines:
            console.print(line, soft_wrap=False)
        if section.table is not None:
            _draw_table(console, section.table)


def draw_grid(console: Console, title: str, grid: str) -> None:
    """Print lines of fixed columns, cut at the console's width."""
    console.print(f"\n{title}", style="bold")
    for line in grid.splitlines():
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _draw_table(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(table.headings()):
        words = table.is_words(index)
        drawn.add_column(
            name,
            justify="left" if words else "right",
            no_wrap=not words,
            overflow="fold",
        )
    for index, row in enumerate(table.rows):
        drawn.add_row(*row, style="bold" if index == table.marked else None)
    console.print(drawn)
