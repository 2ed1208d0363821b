"""Writes a file that is whole or absent, readable by its owner alone."""

from __future__ import annotations

import os
import stat
import tempfile


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a file.

    A regular file is replaced as a whole, behind symbolic links too. Everything else
    (a device, a FIFO) is written to and stays what it is.

    Args:
        path: of the file.
        text: its content, written as UTF-8.

    Raises:
        OSError: the file cannot be written; names ``path``.
        ValueError: an empty path.
    """
    name = os.fspath(path)
    if not name:
        raise ValueError("file to write: expected a name, got ''")
    try:
        if _is_replaceable(name):
            _replace(os.path.realpath(name), text)
        else:
            with open(name, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        if error.errno is None:
            raise
        # A failure may name the file that was to become this one.
        raise OSError(error.errno, error.strerror, name) from None


def _is_replaceable(name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name).st_mode)
    except FileNotFoundError:
        return True


def _replace(target: str, text: str) -> None:
    # mkstemp makes it readable by its owner alone.
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".new.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
