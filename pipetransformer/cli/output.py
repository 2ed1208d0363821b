"""What the commands print: tables by rich, JSON, errors; and the exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

OK = 0
NEGATIVE = 1  # a negative finding: nothing fits, something needed is missing
BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell shows a program that SIGPIPE ended

_STOPPING = ("strict", "surrogateescape")  # handlers of errors that stop at some text
_NO_RICH = (
    "text output: expected the package rich, got none; pip install rich, or use --json"
)


def console() -> Console:
    """Return the console that tables go to: standard output, as wide as it is.

    Returns:
        A ``rich`` console; call it before a long computation.

    Raises:
        ValueError: ``rich`` is not installed; says what to install.
    """
    try:
        import rich.console
    except ModuleNotFoundError:
        raise ValueError(_NO_RICH) from None

    class Pipe(rich.console.Console):
        """A console that leaves it to the caller when its reader went away."""

        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError that rich caught

    # Some terminals say COLUMNS=0 for a width that they do not know.
    nothing = os.environ.get("COLUMNS", "").strip("0") == ""
    width = shutil.get_terminal_size().columns if "COLUMNS" in os.environ else None
    return Pipe(
        file=sys.stdout,
        width=width if nothing else None,
        highlight=False,
        emoji=False,
        markup=False,
    )


class _ClosedStream(io.TextIOBase):
    """Standard output where a shell closed it: a pipe without a reader."""

    def write(self, text: str) -> NoReturn:
        raise BrokenPipeError


def open_streams() -> None:
    """Put something behind streams that are closed, such as by ``>&-``.

    What standard output's encoding lacks is escaped there, as on standard error.
    """
    if sys.stdout is None:
        sys.stdout = _ClosedStream()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _STOPPING:
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end


def drop_output() -> None:
    """Let nothing more be written to a reader that went away, at exit either."""
    if not isinstance(sys.stdout, _ClosedStream):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_data(text: str) -> None:
    """Write text for programs to standard output: in UTF-8, as all files are."""
    data = text.encode()
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # a stream of text alone that a caller has put there
        sys.stdout.write(text)
        return
    sys.stdout.flush()
    buffer.write(data)


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object to standard output.

    Raises:
        ValueError: a value is NaN or infinite: JSON has no such numbers.
    """
    write_data(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_error(error: BaseException) -> None:
    """Print one ``error:`` line to standard error."""
    text = " ".join(str(error).split()) or type(error).__name__
    # What the terminal cannot show, or would obey, is escaped: a message quotes what
    # was read, and names of files.
    encoding = sys.stderr.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    shown = (
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
    sys.stderr.write(f"error: {''.join(shown)}\n")
