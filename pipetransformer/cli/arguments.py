"""What all commands share on the command line: help with examples, and ``--json``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import NoReturn, TypeAlias

_MOST_THREADS = 1024

Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for bad arguments, as files do."""

    def error(self, message: str) -> NoReturn:
        """Raise ``message`` as a ValueError that says where help is."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def add_command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    examples: str,
) -> Parser:
    """Add a command with the options that every command has.

    Args:
        subparsers: of the main parser.
        name: of the command.
        run: takes the parsed arguments, returns the exit code.
        summary: one line for the list of commands.
        description: what the command does, in a sentence or two.
        examples: one command line per line.

    Returns:
        The command's parser, to add its own arguments to.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, 80),
        epilog=indented("examples", examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON for programs instead of text"
    )
    parser.set_defaults(run=run)
    return parser


def indented(title: str, lines: str) -> str:
    """Return a titled block for the end of a help text."""
    rows = [f"  {line.strip()}" for line in lines.strip().splitlines()]
    return "\n".join([f"{title}:", *rows])


def count(text: str) -> int:
    """Read an integer from 1 on; an ``argparse`` type."""
    return _integer(text, low=1)


def threads(text: str) -> int:
    """Read a number of threads that can be started; an ``argparse`` type."""
    return _integer(text, low=1, high=_MOST_THREADS)


def index(text: str) -> int:
    """Read an integer from 0 on; an ``argparse`` type."""
    return _integer(text, low=0)


def counts(text: str) -> tuple[int, ...]:
    """Read integers from 1 on, separated by commas; an ``argparse`` type."""
    return tuple(count(part) for part in text.split(","))


def file_name(text: str) -> str:
    """Read the name of a file to write; an ``argparse`` type."""
    if not text:
        raise argparse.ArgumentTypeError("expected a file's name, got ''")
    return text


def _integer(text: str, low: int, high: int = 2**62) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        most = "2**62" if high == 2**62 else high
        raise argparse.ArgumentTypeError(
            f"expected an integer from {low} to {most}, got {text[:80]!r}"
        )
    return value
