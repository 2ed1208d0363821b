"""How much memory this process may still use, container limits included."""

from __future__ import annotations

import pathlib

_MEMINFO = pathlib.Path("/proc/meminfo")
_CGROUP_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = pathlib.Path("/sys/fs/cgroup/memory.current")


def _meminfo(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{_MEMINFO}: expected a line {name}, got none")


def _cgroup_left() -> int | None:
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), _CGROUP_USED.read_text()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))


def available_bytes() -> int:
    """Return the bytes that can be taken now: host memory or the container's rest."""
    left = _cgroup_left()
    free = _meminfo("MemAvailable")
    return free if left is None else min(free, left)


def host_bytes() -> int:
    """Return the host's memory in bytes."""
    return _meminfo("MemTotal")
