"""Files of tensors: written whole or not at all, read without running any code.

What was read and is wrong is a ValueError. What could not be read is another error,
an OSError or a MemoryError, and says nothing about the file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pathlib
import stat
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from pipetransformer.core import disk
from pipetransformer.core.wire import printable

_LOG = logging.getLogger(__name__)
_ENCRYPTED = 0x1  # of a zip entry's flags
_FOLDER = 0x10  # of its attributes
_LONGEST = 200  # letters of what another library says
_OF_CONTENT = (None, errno.EINVAL)  # errors of zip, and of seeking to before the file
# Torch's CPU allocator has no exception of its own for this.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


def write(
    path: str | os.PathLike[str],
    content: Any,
    *,
    replace: bool = True,
    stamp: Callable[[int], int] | None = None,
) -> None:
    """Write a file: temporary file, fsync, checksums compared, rename; mode 0600.

    Args:
        path: The file; its folder is made when missing.
        content: Tensors, numbers, strings, lists and dicts.
        replace: False: an older file of that name is kept, and this one dropped.
        stamp: Returns the file's modification time, given that of its last write, both
            in nanoseconds; it has it from the moment on in which it has its name.

    Raises:
        ValueError: the path has no file's name.
        OSError: the file could not be written, or does not read back as it was written;
            an older file of that name is intact, or this one is there and whole.
        MemoryError: names the file; an older one is intact.
    """
    target = pathlib.Path(os.fsdecode(path))
    if not target.name:
        raise ValueError(f"path: expected the name of a file to write, got {path!r}")
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    disk.make_folder(target.parent)
    with (
        disk.replacing(
            target, replace=replace, check=_require_written, stamp=stamp
        ) as file,
        _naming_want_of_memory(f"file {target}"),
        _checksums(),
    ):
        torch.save(content, file)


def _require_written(file: IO[bytes]) -> None:
    try:
        _require_whole(file)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damage of any kind raises errors of any kind
        text = f"{os.strerror(errno.EIO)}: reads back otherwise than written, {error}"
        raise OSError(errno.EIO, text) from error


def read(path: str | os.PathLike[str], what: str) -> Any:
    """Read a file of `write`, on the CPU, after comparing all its checksums.

    Args:
        path: The file.
        what: What it is, for error texts.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, changed, of another kind, or holds more than
            tensors and plain values.
        OSError: it could not be read; names it.
        MemoryError: it did not fit into memory; names it.
    """
    try:
        return _read(path, what)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return _read(path, what)  # a server has another file by that name now


def _read(path: str | os.PathLike[str], what: str) -> Any:
    with (
        disk.reading(path, what) as file,
        _wrong_content(what),
        _naming_want_of_memory(what),
    ):
        _require_whole(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def require_whole(path: str | os.PathLike[str], what: str) -> None:
    """Read a file of `write` to its end and compare all its checksums.

    Takes no memory to speak of, whatever the file's size.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, changed, or of another kind.
        OSError: it could not be read; names it.
    """
    with disk.reading(path, what) as file, _wrong_content(what):
        _require_whole(file)


def unpack(message: bytes, what: str) -> Any:
    """Read a small file of tensors that was part of another one.

    Raises:
        ValueError: it is torn, or holds more than tensors and plain values.
    """
    buffer = io.BytesIO(message)
    with _wrong_content(what), _naming_want_of_memory(what):
        with zipfile.ZipFile(buffer) as archive:
            _require_stored(archive, len(message))
        buffer.seek(0)
        return torch.load(buffer, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def _wrong_content(what: str) -> Iterator[None]:
    """Call wrong whatever content could not be read.

    If it was the disk that failed, `disk.reading` says so instead.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # bytes of any kind raise errors of any kind
        if isinstance(error, OSError) and error.errno not in _OF_CONTENT:
            raise  # as when modules that are imported to read it cannot be opened
        first = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{what}: expected a complete file of tensors, got: "
            f"{printable(first, longest=_LONGEST)}"  # may quote what it has read
        ) from error


@contextlib.contextmanager
def _naming_want_of_memory(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(
            text in str(error) for text in _NO_MEMORY
        ):
            raise
        raise MemoryError(
            f"{what}: expected to fit into memory, got: {error}"
        ) from error


def _require_whole(file: IO[bytes]) -> None:
    """Compare all checksums.

    Raises:
        zipfile.BadZipFile: one differs, or it is no archive as torch writes them.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        _require_stored(archive, size)
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"bad checksum of {damaged}")


def _require_stored(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse what torch did not write, or would be larger in memory than on disk."""
    entries = archive.infolist()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
            raise zipfile.BadZipFile(f"a compressed entry {entry.filename!r}")
        # No checksum covers this mark, with which torch reads nothing, in silence.
        if entry.external_attr & _FOLDER or entry.is_dir():
            raise zipfile.BadZipFile(f"a folder {entry.filename!r}")
    claimed = sum(entry.file_size for entry in entries)
    if claimed > size:
        raise zipfile.BadZipFile(f"entries of {claimed} bytes in {size}")
    if not any(entry.filename.endswith("/data.pkl") for entry in entries):
        raise zipfile.BadZipFile("an archive of another kind")


def make_folder(directory: str | os.PathLike[str], what: str) -> None:
    """Make a folder, now rather than when the first file is to be written.

    Args:
        directory: The folder, with all above it; one that is there is left as it is.
        what: Who named it, for error texts.

    Raises:
        ValueError: it is none, or cannot be made, or written to.
    """
    folder, expected = pathlib.Path(directory), f"{what}: expected a folder to write to"
    try:
        disk.make_folder(folder)
        mode = folder.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte in its name
        raise ValueError(f"{expected}, got {str(folder)!r}: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{expected}, got {str(folder)!r}, which is read-only")
    if mode & stat.S_IWOTH:
        _LOG.warning(
            "%s: every user may write to %s, and so choose what a run goes on from",
            what,
            folder,
        )


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Let torch write checksums, whatever the program chose for its own files."""
    chosen = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(chosen)
