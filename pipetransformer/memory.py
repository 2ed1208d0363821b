"""How much memory the host has."""

from __future__ import annotations

import pathlib

_MEMINFO = pathlib.Path("/proc/meminfo")


def host_bytes() -> int:
    """Return the host's memory in bytes.

    Raises:
        RuntimeError: the host does not tell.
    """
    for line in _MEMINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "MemTotal":
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{_MEMINFO}: expected a line MemTotal, got none")
