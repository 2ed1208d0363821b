"""A report as sections of sentences and tables, before it is drawn.

Drawn as plain text by :mod:`.text`, in colour by the command line.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Args:
        columns: headings; a heading that ends in ``"<"`` is a column of words, drawn
            to the left (without the sign); the others are numbers.
        rows: one cell per column.
        marked: index of the row that stands out, if any.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None

    def headings(self) -> list[str]:
        """Return the headings as shown."""
        return [name.removesuffix("<") for name in self.columns]

    def is_words(self, column: int) -> bool:
        """Whether a column is drawn to the left."""
        return self.columns[column].endswith("<")


@dataclass(frozen=True)
class Section:
    """A title, then sentences, then a table.

    Args:
        title: one line; empty for the headline.
        lines: sentences.
        table: or None.
    """

    title: str
    lines: tuple[str, ...] = ()
    table: Table | None = None


def milliseconds(ns: int | None) -> str:
    """Return for example ``12.345 ms``; a dash for None."""
    return "-" if ns is None else f"{ns / 1e6:.3f} ms"


def seconds(ns: int) -> str:
    """Return for example ``1.50 s``."""
    return f"{ns / 1e9:.2f} s"


def megabytes(size: int | None) -> str:
    """Return for example ``12.3 MB`` (10**6 bytes); a dash for None."""
    return "-" if size is None else f"{size / 1e6:.1f} MB"


def percent(share: float | None) -> str:
    """Return for example ``12.5 %``; a dash for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def hash_text(value: int) -> str:
    """Return a 64-bit hash as 16 hexadecimal digits."""
    return f"{value:016x}"
