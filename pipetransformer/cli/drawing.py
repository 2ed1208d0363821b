"""Draws the sections of a report on a rich console."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.segment import Segment
    from rich.table import Table as RichTable

    from pipetransformer.explanation import Section, Table
    from pipetransformer.simulator import Simulation


_LEAST_TEXT = 12  # columns that a cell of several words keeps
_UNLIMITED = 2**40
_LEAST_GRID = 10  # columns of time


def draw(console: Console, document: Iterable[Section]) -> None:
    """Print the sections: bold titles, sentences, tables as wide as the console."""
    for section in document:
        if not section.lines and section.table is None:
            continue
        if section.title:
            console.print(f"\n{section.title}", style="bold")
        for line in section.lines:
            console.print(_wrapped(line, console.width))
        if section.table is not None:
            _draw_table(console, section.table)


def draw_grid(console: Console, simulation: Simulation) -> None:
    """Print the simulated schedule over the console's width."""
    label = len(simulation.grid(_LEAST_GRID).splitlines()[1]) - _LEAST_GRID
    width = max(_LEAST_GRID, console.width - label)
    heading, *rows, legend = simulation.grid(width).splitlines()
    console.print("\nSchedule", style="bold")
    console.print(heading)
    for row in rows:
        console.print(row, soft_wrap=True)
    console.print(legend)


def print_table(console: Console, table: RichTable) -> None:
    """Print a table within the console's width, or one line per row.

    Columns that may not wrap are never broken, and the others never to less than a
    few letters. Where that does not fit, lines are as long as the rows are: a terminal
    breaks them, a pipe and a file hold them. Nothing is cut off.
    """
    from rich.measure import Measurement
    from rich.segment import Segment, Segments

    unlimited = console.options.update(width=_UNLIMITED)

    def width_of(drawn: RenderableType) -> int:
        return Measurement.get(console, unlimited, drawn).maximum

    full = least = width_of(table)
    for column in table.columns:
        widest = max(map(width_of, (column.header, *column.cells)))
        column.overflow = "fold"
        column.min_width = widest if column.no_wrap else min(widest, _LEAST_TEXT)
        least -= widest - column.min_width
    width = full if least > console.width else console.width
    for line in console.render_lines(table, console.options.update(width=width)):
        line = [*_without_spaces(line), Segment.line()]
        console.print(Segments(line), soft_wrap=True)


def _without_spaces(line: list[Segment]) -> list[Segment]:
    """Return a line without the spaces that fill its last columns."""
    from rich.segment import Segment

    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], *(Segment(s.text.rstrip(), s.style) for s in line[-1:])]


def _wrapped(line: str, width: int) -> str:
    """Return a sentence on several lines, all as far in as its first word."""
    words = line.lstrip(" -")
    indent = " " * min(len(line) - len(words), width // 2)
    # Of a long word textwrap would copy the rest for each of its lines.
    line = re.sub(rf"(\S{{{width - len(indent)}}})(?=\S)", r"\1 ", line)
    return textwrap.fill(line, width, subsequent_indent=indent)


def _draw_table(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable

    drawn = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False
    )
    for column in table.columns:
        drawn.add_column(
            column.name,
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.kind != "text",
        )
    for index, row in enumerate(table.rows):
        drawn.add_row(*row, style="bold" if index == table.marked else None)
    print_table(console, drawn)
