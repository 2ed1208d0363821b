"""Files of tensors: written whole or not at all, read without running any code."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

_LOG = logging.getLogger(__name__)
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def write(
    path: str | os.PathLike[str],
    content: Any,
    *,
    replace: bool = True,
    stamp: Callable[[int], int] | None = None,
) -> None:
    """Write a file: temporary file, fsync, rename; mode 0600.

    The temporary file is locked while its writer lives, so that `clear_unfinished`
    can tell what a dead writer left behind.

    Args:
        path: The file; its folder is made when missing.
        content: Tensors, numbers, strings, lists and dicts.
        replace: False: an older file of that name is kept, and this one dropped.
        stamp: Returns the file's modification time, given that of its last write, both
            in nanoseconds; it has it from the moment on in which it has its name.

    Raises:
        ValueError: the path has no file's name.
        OSError: the file could not be written; an older file of that name is intact.
    """
    target = pathlib.Path(os.fsdecode(path))
    if not target.name:
        raise ValueError(f"path: expected the name of a file to write, got {path!r}")
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _lock(file)
            try:
                with _checksums():
                    torch.save(content, file)
            except RuntimeError as error:  # torch's writer hides the OSError
                raise _os_error(error, target) from error
            file.flush()
            os.fsync(file.fileno())
            if stamp is not None:
                time_ns = stamp(os.fstat(file.fileno()).st_mtime_ns)
                os.utime(file.fileno(), ns=(time_ns, time_ns))
            _publish(temporary, target, replace=replace)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _os_error(error: BaseException, target: pathlib.Path) -> OSError:
    """Return the OSError behind what torch's writer raised, about `target`."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno is not None:
            return OSError(found.errno, os.strerror(found.errno), str(target))
        found = found.__cause__ or found.__context__
    return OSError(f"{target}: {error}")


def _publish(temporary: pathlib.Path, target: pathlib.Path, *, replace: bool) -> None:
    if not replace:
        try:
            os.link(temporary, target)
            return
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            if target.exists():
                return
    os.replace(temporary, target)


def read(path: str | os.PathLike[str], what: str) -> Any:
    """Read a file of `write`, on the CPU, after comparing all its checksums.

    Args:
        path: The file.
        what: What it is, for error texts.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, changed, of another kind, or holds more than
            tensors and plain values.
    """
    try:
        with open(path, "rb") as file:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"bad checksum of {damaged}")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # bytes of any kind raise errors of any kind
        first = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{what}: expected a complete file of tensors, got: {first}"
        ) from error


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
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in its name
        raise ValueError(f"{expected}, got {str(folder)!r}: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{expected}, got {str(folder)!r}, which is read-only")


def clear_unfinished(directory: str | os.PathLike[str]) -> None:
    """Delete the temporary files that writers of this folder left when they died."""
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if not _UNFINISHED.fullmatch(path.name):
            continue
        try:
            with path.open("rb") as file:
                if not _lock(file):
                    continue  # being written
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # its writer has just finished
        except OSError as error:  # of another user
            _LOG.warning("left as it is: %s", error)
            continue
        _LOG.info("deleted %s, which its writer left unfinished", path)


def _lock(file: IO[bytes]) -> bool:
    """Tell whether the file could be locked; the lock goes with its last holder."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another process, or a file system without locks
        return False
    return True


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Let torch write checksums, whatever the program chose for its own files."""
    chosen = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(chosen)
