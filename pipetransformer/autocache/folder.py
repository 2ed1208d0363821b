"""Files of cached activations: records that outlive the run that made them.

A file begins with a line of JSON in `HEAD_BYTES` bytes, which says what is in it;
records follow as `csrc/autocache/record_file.h` has them. A record's own key says
whether it is valid (layers, weights, input), and its checksums whether it is whole: the
line at the beginning only tells which files are worth reading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import platform
import re
import stat
import sys
import threading
import time
from typing import IO, NamedTuple

import torch

from pipetransformer import _C
from pipetransformer.autocache.cache import ActivationCache
from pipetransformer.core import disk, tensor_files

_LOG = logging.getLogger(__name__)

HEAD_BYTES = 4096
SUFFIX = ".activations"
_FORMAT = 2
_CLOSING_S = 60.0  # for a file that is being written when the run ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What a file says of its records.

    Attributes:
        format: Of the file.
        machine: Byte order and kind of the processor.
        torch_version: Of the torch that computed the records.
        space: Id space: ``"train"`` or the name of an evaluation set.
        samples: Number of its samples.
        layers: Fingerprint of the model's first layer, in hexadecimal.
        records: Number of records.
        file_bytes: Size of the file.
    """

    format: int = _FORMAT
    machine: str = f"{sys.byteorder} {platform.machine()}"
    torch_version: str = str(torch.__version__)
    space: str
    samples: int
    layers: str
    records: int = 0
    file_bytes: int = 0

    def to_line(self) -> bytes:
        """Return `HEAD_BYTES` bytes.

        Raises:
            ValueError: the name of the space is too long.
        """
        line = json.dumps(dataclasses.asdict(self)).encode()
        if len(line) >= HEAD_BYTES:
            raise ValueError(
                f"name of a set: expected at most {HEAD_BYTES // 16} letters to keep "
                f"its records, got {len(self.space)}"
            )
        return line.ljust(HEAD_BYTES - 1) + b"\n"


def read_head(file: IO[bytes]) -> Head:
    """Read what a file of this user says of itself.

    Raises:
        ValueError: it is none of ours, or was cut short.
        OSError: the disk reported an error.
    """
    info = os.fstat(file.fileno())
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("expected a file that its user alone may write, got another")
    try:
        fields = json.loads(file.read(HEAD_BYTES))
    except (ValueError, RecursionError):
        fields = None
    kinds = {field.name: field.type for field in dataclasses.fields(Head)}
    fits = (
        isinstance(fields, dict)
        and {name: type(value).__name__ for name, value in fields.items()} == kinds
    )
    if not fits or fields["format"] != _FORMAT:
        raise ValueError(f"expected cached activations of format {_FORMAT}, got others")
    head = Head(**fields)
    if head.file_bytes != info.st_size:
        raise ValueError(f"expected {head.file_bytes} bytes, got {info.st_size}")
    return head


@dataclasses.dataclass(frozen=True)
class CacheFile:
    """A file of a folder.

    Attributes:
        path: Where it is.
        head: What it says of itself; None: it cannot be used.
        problem: Why not.
    """

    path: pathlib.Path
    head: Head | None
    problem: str = ""


def cache_files(folder: str | os.PathLike[str]) -> list[CacheFile]:
    """Return the files of a folder, by name.

    Raises:
        OSError: the folder cannot be read.
    """
    paths = sorted(
        pathlib.Path(folder, name)
        for name in os.listdir(folder)
        if name.endswith(SUFFIX) and not name.startswith(".")
    )
    return [_looked_at(path) for path in paths]


def _looked_at(path: pathlib.Path) -> CacheFile:
    try:
        with disk.reading(path, str(path), follow=False) as file:
            return CacheFile(path, read_head(file))
    except (OSError, ValueError) as error:
        return CacheFile(path, None, str(error))


def damaged_records(path: str | os.PathLike[str]) -> int:
    """Read a file whole and return how many of its records are damaged or missing.

    Raises:
        ValueError: it is none of ours.
        OSError: the disk reported an error.
    """
    with disk.reading(path, os.fspath(path), follow=False) as file:
        head = read_head(file)
        found = _C.autocache.check_records(file.fileno(), HEAD_BYTES, head.file_bytes)
    return max(found.damaged, head.records - found.records)


class CacheFolder:
    """Where the caches of a node's runs are kept, a file for each id space.

    The process that made a cache loads and saves it. Whatever goes wrong with a file
    is logged in a line and costs hits, never the run.

    Args:
        folder: The folder; `make` makes it.
        node: Index of the node: nodes that share a folder write files of their own,
            and read all.

    Source: the second role of the paper's AutoCache, made safe across runs.
    """

    def __init__(self, folder: str | os.PathLike[str], node: int = 0) -> None:
        self._folder = pathlib.Path(folder)
        self._node = node
        self._states: dict[pathlib.Path, _State] = {}
        self._saving: threading.Thread | None = None

    def make(self) -> None:
        """Make the folder.

        Raises:
            ValueError: nothing can be written there.
        """
        tensor_files.make_folder(self._folder, "CacheConfig.directory")

    def path_of(self, space: str, layers: int, samples: int) -> pathlib.Path:
        """Return the file of an id space and a first layer, for this torch."""
        return self._path(_wanted(space, layers, samples))

    def _path(self, wanted: Head) -> pathlib.Path:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", wanted.space)[:64]
        digest = _C.core.hash_bytes(repr(wanted).encode())
        return self._folder / f"{name}-{digest:016x}-{self._node}{SUFFIX}"

    def load(self, cache: ActivationCache, space: str, layers: int) -> int:
        """Read into a cache what earlier runs kept of it.

        Args:
            cache: Is given the records of samples that it has none of.
            space: Its id space.
            layers: Fingerprint of the model's first layer.

        Returns:
            Number of records read.
        """
        wanted = _wanted(space, layers, cache.num_samples)
        own = self._path(wanted)
        before = _identity(own)  # what others write meanwhile is read before a save
        taken = left = 0
        began = time.perf_counter()
        try:
            disk.clear_unfinished(self._folder)
            found = cache_files(self._folder)
        except OSError as error:
            _LOG.warning("no records of earlier runs: %s", error)
            found = []
        for file in found:
            if file.head is not None and _fit(file.head, wanted):
                counts = self._read(file.path, cache)
                taken += counts.taken
                left += counts.left if file.path == own else 0
            elif file.path == own:
                _LOG.warning("%s is left unread: %s", file.path, file.problem)
                left = 1  # if its records can be read later, they stay
        clears = cache.num_clears
        self._states[own] = _State(wanted, before, _progress(cache), left, clears)
        if left:
            _LOG.info("%s: records that have no room here stay there alone", own)
        if taken:
            seconds = time.perf_counter() - began
            _LOG.info(
                "%d records of earlier runs for the %d samples of %r, read in %.1f s",
                taken,
                cache.num_samples,
                space,
                seconds,
            )
        return taken

    def _read(self, path: pathlib.Path, cache: ActivationCache) -> _Counts:
        try:
            with disk.reading(path, str(path), follow=False) as file:
                head = read_head(file)
                found = cache.load(file.fileno(), HEAD_BYTES, head.file_bytes)
        except OSError as error:  # what cannot be read now is not to be replaced
            _LOG.warning("%s is left unread: %s", path, error)
            return _Counts(left=1)
        except ValueError as error:
            _LOG.warning("%s is left unread: %s", path, error)
            return _Counts()
        if found.damaged:
            _LOG.warning("%s: %d records are damaged", path, found.damaged)
        return _Counts(found.taken, found.left)

    def save_soon(self, cache: ActivationCache, space: str, layers: int) -> None:
        """Begin to write a loaded cache's records, if there are new ones.

        A thread writes; while it does, or another run writes to the folder, nothing
        is begun.
        """
        if self._saving is not None and self._saving.is_alive():
            return
        path = self.path_of(space, layers, cache.num_samples)
        if self._states[path].saved == _progress(cache):
            return
        saving = threading.Thread(
            target=self._save, args=(cache, path, 0.0), name="cache file", daemon=True
        )
        try:
            saving.start()
        except RuntimeError as error:  # no more threads
            _LOG.warning("cached activations are not kept now: %s", error)
            return
        self._saving = saving

    def settle(self) -> bool:
        """Wait for what is being written; tell whether it is done.

        As long as it grows: a minute without any more ends it.
        """
        if self._saving is None:
            return True
        written = self._unfinished()
        while True:
            self._saving.join(_CLOSING_S)
            if not self._saving.is_alive():
                return True
            before, written = written, self._unfinished()
            if written == before:
                _LOG.warning("%s: still being written; left to itself", self._folder)
                return False

    def _unfinished(self) -> dict[str, int]:
        """Return the sizes of this folder's own files that are not whole yet."""
        found, own = {}, tuple(f".{path.name}." for path in self._states)
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.name.startswith(own) and entry.name.endswith(".tmp"):
                    with contextlib.suppress(OSError):  # it is whole by now
                        found[entry.name] = entry.stat().st_size
        return found

    def save(self, cache: ActivationCache, space: str, layers: int) -> None:
        """Write a loaded cache's records, if there are new ones.

        Waits at most a minute for others that write.
        """
        if not self.settle():
            return
        path = self.path_of(space, layers, cache.num_samples)
        if self._states[path].saved != _progress(cache):
            self._save(cache, path, _CLOSING_S)

    def _save(self, cache: ActivationCache, path: pathlib.Path, wait_s: float) -> None:
        state = self._states[path]
        progress = _progress(cache)
        try:
            with disk.alone_in(self._folder, wait_s) as alone:
                if not alone:
                    level = logging.WARNING if wait_s > 0 else logging.INFO
                    what = "not kept" if wait_s > 0 else "later"
                    _LOG.log(level, "%s: another run writes; %s", self._folder, what)
                    return
                while True:
                    clears = cache.num_clears
                    if clears != state.clears:
                        # What is there, of other runs as well, may be as wrong.
                        state.left = 0
                    elif _identity(path) != state.identity:
                        # What another run added.
                        state.left = self._read(path, cache).left
                        progress = _progress(cache)
                    self._write(cache, path, state, merge=clears == state.clears)
                    state.saved, state.identity = progress, _identity(path)
                    state.clears = clears
                    if cache.num_clears == clears:
                        return
        except (OSError, ValueError) as error:
            state.saved = progress
            _LOG.warning("cached activations are not kept: %s", error)

    def _write(
        self, cache: ActivationCache, path: pathlib.Path, state: _State, *, merge: bool
    ) -> None:
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(disk.replacing(path))
            older = _records_of(path, state.head, opened) if merge else None
            file.write(state.head.to_line())
            file.flush()
            found = cache.save(
                file.fileno(), HEAD_BYTES, older, incomplete=state.left > 0
            )
            whole = dataclasses.replace(
                state.head, records=found.records, file_bytes=found.bytes
            )
            file.seek(0)
            file.write(whole.to_line())


class _Counts(NamedTuple):
    taken: int = 0
    left: int = 0


@dataclasses.dataclass
class _State:
    """What is known of a file.

    Attributes:
        head: What it will say of itself, but for what it holds.
        identity: Of the file as it was before it was read, or once it was written.
        saved: Progress of the cache then.
        left: Above 0: records of it had no room in the cache, or it could not be read:
            they stay in the file.
        clears: How often the cache had been cleared then.
    """

    head: Head
    identity: tuple[int, ...] | None
    saved: tuple[int, int]
    left: int
    clears: int


def _wanted(space: str, layers: int, samples: int) -> Head:
    return Head(space=space, samples=samples, layers=f"{layers:016x}")


def _fit(head: Head, wanted: Head) -> bool:
    return dataclasses.replace(head, records=0, file_bytes=0) == wanted


def _progress(cache: ActivationCache) -> tuple[int, int]:
    """Return numbers that grow as this process, or any other, stores records."""
    return cache.used_bytes, cache.counters.stored


def _records_of(
    path: pathlib.Path, wanted: Head, opened: contextlib.ExitStack
) -> tuple[int, int, int] | None:
    """Open a file that is to be replaced; return where its records are.

    Returns:
        Descriptor, first byte and end; None: there is none that fits.

    Raises:
        OSError: it cannot be read, so nobody knows what would be lost.
    """
    try:
        file = opened.enter_context(disk.reading(path, str(path), follow=False))
        head = read_head(file)
    except (FileNotFoundError, ValueError):  # it was told of when it was to be read
        return None
    return (file.fileno(), HEAD_BYTES, head.file_bytes) if _fit(head, wanted) else None


def _identity(path: pathlib.Path) -> tuple[int, ...] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size
