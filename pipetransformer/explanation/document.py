"""A report as sections of sentences and tables, before it is drawn.

Drawn as plain text by :mod:`.text`, in colour by the command line.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: heading.
        kind: ``"number"`` (drawn to the right), ``"word"`` (to the left) or ``"text"``
            (to the left, may take several lines).
    """

    name: str
    kind: str = "number"


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Args:
        columns: their headings.
        rows: one cell per column.
        marked: index of the row that stands out, if any.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None


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


def columns(names: str, **kinds: str) -> tuple[Column, ...]:
    """Return columns from names apart by commas, numbers unless ``kinds`` says so.

    Args:
        names: such as ``"K, cuts, estimate ms"``.
        kinds: by the first word of a name.
    """
    found = [name.strip() for name in names.split(",")]
    return tuple(Column(name, kinds.get(name.split()[0], "number")) for name in found)


def milliseconds(ns: int | None) -> str:
    """Return for example ``12.345 ms``, cut off after that; a dash for None."""
    if ns is None:
        return "-"
    microseconds = abs(ns) // 1000
    sign = "-" if ns < 0 else ""
    return f"{sign}{microseconds // 1000}.{microseconds % 1000:03d} ms"


def bare_milliseconds(ns: int | None) -> str:
    """Return :func:`milliseconds` without the unit, for columns that name it."""
    return milliseconds(ns).removesuffix(" ms")


def seconds(ns: int) -> str:
    """Return for example ``1.50 s``."""
    return f"{ns / 1e9:.2f} s"


def megabytes(size: int | None) -> str:
    """Return for example ``12.3 MB`` (10**6 bytes); a dash for None."""
    return "-" if size is None else f"{size / 1e6:.1f} MB"


def bare_megabytes(size: int | None) -> str:
    """Return :func:`megabytes` without the unit, for columns that name it."""
    return megabytes(size).removesuffix(" MB")


def percent(share: float | None) -> str:
    """Return for example ``12.5 %``; a dash for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def counted(count: int, thing: str) -> str:
    """Return for example ``1 node`` or ``2 nodes``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def hash_text(value: int) -> str:
    """Return a 64-bit hash as 16 hexadecimal digits."""
    return f"{value:016x}"
