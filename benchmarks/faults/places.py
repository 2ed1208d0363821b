"""What a process finds around it: clocks, disks and memory that a case has changed.

Mounts are real. A slow disk, a clock that jumps and a limit on what a cache may take
are simulated within the one process, by wrapping what it calls; each function says
how. Nothing outside the run notices.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DISK = "size=4m"
SLAB_BYTES = 4096  # less than any cache of the small run


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Let a folder be a file system of 4 MiB, until the block is left.

    Raises:
        subprocess.CalledProcessError: the machine does not permit it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def mounts_refused() -> str:
    """Return why this machine lets no process mount anything; empty if it does."""
    test = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        done = subprocess.run(test, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "no unshare(1)"
    return done.stderr.strip() if done.returncode else ""


def fill_disk(folder: Path) -> None:
    """Write to a folder's file system until it is full."""
    block = bytes(1 << 16)
    file = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while True:
            os.write(file, block)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(file)


def slow_fsync(seconds: float, *, times: int) -> None:
    """Delay the next calls of ``os.fsync`` of this process, one after the other."""
    real, left = os.fsync, [times]

    def fsync(fd: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            time.sleep(seconds)
        real(fd)

    os.fsync = fsync


def jump_clock(seconds: float) -> None:
    """Let this process see another time of day from here on.

    Both what Python reads and what the files it writes carry: the kernel's own clock
    is the whole machine's. C++ has no part in this; a test of the sources says that
    it reads monotonic clocks alone.
    """
    real, real_ns, fsync = time.time, time.time_ns, os.fsync

    def stamped(fd: Any) -> None:
        fsync(fd)
        now = real() + seconds  # of the last write, as the writer then finds it
        os.utime(fd, (now, now))

    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
    os.fsync = stamped


def without_room(owner: Any, name: str, refused: Callable[[], None]) -> None:
    """Let a class method's files stay below 4 KiB: the process's limit on their size.

    Args:
        owner: The class.
        name: The method.
        refused: Called when it fails for that.
    """
    inner = owner.__dict__[name].__func__

    def limited(*args: Any, **options: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SLAB_BYTES, hard))
        try:
            return inner(*args, **options)
        except OSError:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            refused()
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    setattr(owner, name, classmethod(limited))
