"""Writes a text file that is whole or absent, readable by its owner alone."""

from __future__ import annotations

import os
import stat

from pipetransformer.core import disk


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
            with disk.replacing(os.path.realpath(name)) as file:
                file.write(text.encode())
        else:
            with open(name, "w", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as error:
        if error.errno is None:
            raise
        # A failure may name the file that was to become this one.
        raise disk.about(error, name) from None


def replace(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that nobody names in a command; a symbolic link is replaced, too.

    Args:
        path: of the file.
        text: its content, written as UTF-8.

    Raises:
        OSError: the file cannot be written; names ``path``.
    """
    with disk.replacing(path) as file:
        file.write(text.encode())


def _is_replaceable(name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name).st_mode)
    except FileNotFoundError:
        return True
