"""Files on disks that fail: written whole or not at all, opened without a hang.

Every file that the library leaves behind is written by `replacing`. What a disk
reports, at any call, leaves here as an OSError that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import pathlib
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_LOG = logging.getLogger(__name__)
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_LONGEST = 200  # bytes of the file's name in that of the temporary one, of 255
_BUFFER = 2**17  # bytes
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


class _Watched(io.FileIO):
    """An open file that keeps what its disk reported.

    Libraries that read and write through it raise errors of their own in its place.
    """

    failure: OSError | None = None

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        with self._watch():
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._watch():
            return super().readall()

    def write(self, data: ReadableBuffer, /) -> int:
        with self._watch():
            return super().write(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._watch():  # servers of files are asked for the end
            return super().seek(offset, whence)

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EINVAL:  # a place before the file's beginning
                self.failure = error
            raise


def _watched(descriptor: int, mode: str) -> _Watched:
    try:
        return _Watched(descriptor, mode)
    except OSError:  # it could not be looked at, and is not its own yet
        os.close(descriptor)
        raise


def about(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """Return the same error, of the same kind, with the name of a file."""
    name = os.fspath(path)
    if error.errno is None:
        return OSError(f"{name}: {error}")
    return OSError(error.errno, error.strerror or os.strerror(error.errno), name)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder with all above it; one that is there is left as it is.

    Whatever the umask, nobody but the owner may write to a folder that is made.

    Raises:
        OSError: it could not be made, or is a file.
    """
    folder = pathlib.Path(path)
    try:
        _make_one(folder)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        _make_one(folder)  # once: /proc says the same of what it does not make


def _make_one(folder: pathlib.Path) -> None:
    try:
        os.mkdir(folder, 0o755)
    except FileNotFoundError:
        raise
    except OSError:  # that it is there, or what the system noticed before
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(folder).st_mode):
                return
        raise


@contextlib.contextmanager
def reading(
    path: str | os.PathLike[str], what: str, *, follow: bool = True
) -> Iterator[IO[bytes]]:
    """Open a regular file to read.

    Nothing but a regular file is opened: a FIFO would hang, a device may act.

    Args:
        path: The file.
        what: What it is, for error texts.
        follow: False: a symbolic link is none of ours either.

    Raises:
        OSError: the disk reported an error, whatever the body made of it; names the
            file.
        ValueError: it is no regular file.
    """
    try:
        _require_regular(os.stat(path, follow_symlinks=follow), what)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
        raw = _watched(descriptor, "rb")
        with io.BufferedReader(raw, _BUFFER) as file, _telling_failure_of(raw):
            _require_regular(os.fstat(descriptor), what)
            yield file
    except OSError as error:
        raise about(error, path) from error


def _require_regular(info: os.stat_result, what: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise ValueError(f"{what}: expected a regular file, got {kind}")


@contextlib.contextmanager
def _telling_failure_of(raw: _Watched) -> Iterator[None]:
    """Raise what the disk reported in place of what the body made of it."""
    try:
        yield
    except Exception as error:
        if raw.failure is not None and error is not raw.failure:
            raise raw.failure from error
        raise
    if raw.failure is not None:
        raise raw.failure


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str],
    *,
    replace: bool = True,
    check: Callable[[IO[bytes]], None] | None = None,
    stamp: Callable[[int], int] | None = None,
) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of another one when the body ends.

    The temporary file is synced and renamed; its mode is 0600. It is locked while its
    writer lives, so that `clear_unfinished` can tell what a dead writer left behind. A
    symbolic link is replaced, and not followed; a device, a FIFO or a socket is not.

    Args:
        path: The file.
        replace: False: an older file of that name is kept, and this one dropped.
        check: Called with the synced file at its beginning, before it takes its place;
            raises if it is not to.
        stamp: Returns the file's modification time, given that of its last write, both
            in nanoseconds; it has it from the moment on in which it has its name.

    Raises:
        OSError: the file could not be written; names it. What has its name then is the
            older file, intact, or this one, whole, if the disk failed after that.
            FileExistsError: something else than a file has its name.
    """
    target = pathlib.Path(path)
    _require_replaceable(target)
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST])
    temporary = target.with_name(f".{name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o600)
    except OSError as error:
        raise about(error, path) from error
    try:
        raw = _watched(descriptor, "r+b")
        with io.BufferedRandom(raw, _BUFFER) as file, _telling_failure_of(raw):
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if check is not None:
                file.seek(0)
                check(file)
            if stamp is not None:
                time_ns = stamp(os.fstat(file.fileno()).st_mtime_ns)
                os.utime(file.fileno(), ns=(time_ns, time_ns))
            _publish(temporary, target, replace=replace)
        _sync_folder(target.parent)
    except OSError as error:
        raise about(error, path) from error
    finally:
        _discard(temporary)


def _require_replaceable(target: pathlib.Path) -> None:
    try:
        kind = stat.S_IFMT(target.lstat().st_mode)
    except OSError:
        return  # whoever opens it is told
    if kind not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
        found = _KINDS.get(kind, "something else")
        raise FileExistsError(
            errno.EEXIST, f"expected a regular file or none, got {found}", str(target)
        )


def _publish(temporary: pathlib.Path, target: pathlib.Path, *, replace: bool) -> None:
    if not replace:
        try:
            os.link(temporary, target)
            return
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        # A file system without hard links.
        with contextlib.suppress(FileNotFoundError):
            target.lstat()
            return
    os.replace(temporary, target)


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no folders
            raise
    finally:
        os.close(descriptor)


def _discard(temporary: pathlib.Path) -> None:
    """Delete what did not become the file; the error that led here matters more."""
    try:
        temporary.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("left behind: %s", error)


def clear_unfinished(directory: str | os.PathLike[str]) -> None:
    """Delete the temporary files that writers of this folder left when they died.

    Raises:
        OSError: the folder could not be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        if not _UNFINISHED.fullmatch(name):
            continue
        path = pathlib.Path(directory, name)
        try:
            with _held(path) as held:
                if held:
                    continue  # being written
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # its writer has just finished
        except OSError as error:  # it is another user's, or cannot be locked
            _LOG.warning("left as it is: %s", about(error, path))
            continue
        except ValueError as error:  # no file of ours
            _LOG.warning("left as it is: %s", error)
            continue
        _LOG.info("deleted %s, which its writer left unfinished", path)


@contextlib.contextmanager
def _held(path: pathlib.Path) -> Iterator[bool]:
    """Lock a regular file meanwhile; tell whether another process holds it.

    Raises:
        OSError: it cannot be opened for writing, which locks of NFS take, or there are
            no locks.
        ValueError: it is no regular file.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
    _require_regular(os.stat(path, follow_symlinks=False), str(path))
    descriptor = os.open(path, flags)
    try:
        _require_regular(os.fstat(descriptor), str(path))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield True
        else:
            yield False
    finally:
        os.close(descriptor)


def set_aside(folder: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Put a number into the names of files that belong together, as far as they exist.

    It is the next one that none of them has: ``a.json`` becomes ``a.1.json``.

    Raises:
        OSError: a file cannot be given another name.
    """
    paths = [pathlib.Path(folder, name) for name in names]
    number = 1
    while any(_numbered(path, number).exists() for path in paths):
        number += 1
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.rename(_numbered(path, number))


def _numbered(path: pathlib.Path, number: int) -> pathlib.Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


@contextlib.contextmanager
def alone_in(folder: str | os.PathLike[str], wait_s: float) -> Iterator[bool]:
    """Tell whether no other process is in such a body for the folder until this ends.

    Args:
        folder: The folder.
        wait_s: How long to wait for another one, in seconds.

    Raises:
        OSError: the folder cannot be opened.
    """
    until = time.monotonic() + wait_s
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        alone = _alone(descriptor)
        while not alone and time.monotonic() < until:
            time.sleep(0.05)
            alone = _alone(descriptor)
        yield alone
    finally:
        with contextlib.suppress(OSError):  # a forked child may hold it open
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _alone(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: the last writer wins
        _LOG.debug("cannot be locked: %s", error)
    return True
