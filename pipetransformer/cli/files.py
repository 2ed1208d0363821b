"""Reads and writes the commands' files: profiles, clusters and plans."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipetransformer.cli import output

if TYPE_CHECKING:
    from pipetransformer.planner import Cluster, Plan, Profile

STANDARD_STREAM = "-"
_MOST_BYTES = 256 * 2**20


def read_profile(path: str) -> Profile:
    """Read a profile from a file, or from standard input for ``"-"``.

    The file may also be one that a run has kept (``PlanConfig.profile``): the profile
    is taken out of it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no profile; the text names file and field.
    """
    from pipetransformer.planner import Profile

    text = read_text(path)
    fields = _fields(text)
    if _is_kept(fields):
        text = json.dumps(fields["profile"])
    with named(path, text, "profile"):
        return Profile.from_json(text)


def read_cluster(path: str) -> Cluster:
    """Read a cluster; otherwise as :func:`read_profile`."""
    from pipetransformer.planner import Cluster

    text = read_text(path)
    with named(path, text, "cluster"):
        return Cluster.from_json(text)


def read_plan(path: str) -> Plan:
    """Read a plan; otherwise as :func:`read_profile`."""
    from pipetransformer.planner import Plan

    text = read_text(path)
    with named(path, text, "plan"):
        return Plan.from_json(text)


def summary_file(path: str) -> str:
    """Return the summary in a run's folder; of what is no folder the path itself."""
    return os.path.join(path, "summary.json") if os.path.isdir(path) else path


def read_text(path: str, *, most_bytes: int = _MOST_BYTES) -> str:
    """Read UTF-8 text from a file, or from standard input for ``"-"``.

    Args:
        path: of the file.
        most_bytes: larger files are refused.

    Returns:
        The text.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, or no UTF-8; the text names it.
    """
    if path == STANDARD_STREAM:
        if sys.stdin is None:
            raise ValueError("standard input: expected an open one, got a closed one")
        data = sys.stdin.buffer.read(most_bytes + 1)
    else:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)
    with named(path):
        if len(data) > most_bytes:
            raise ValueError(f"size: expected at most {most_bytes} bytes, got more")
        return decode(data)


def decode(data: bytes) -> str:
    """Return the text of UTF-8 bytes.

    Raises:
        ValueError: the bytes are no UTF-8; the text says where.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text: expected UTF-8, got byte 0x{data[error.start]:02x} at {error.start}"
        ) from None


def write_text(path: str, text: str) -> None:
    """Write a file that is whole or absent, readable by its owner alone.

    Args:
        path: of the file; ``"-"`` is standard output.
        text: its content; a line feed is added at the end.

    Raises:
        OSError: the file cannot be written; names it.
        ValueError: an empty path.
    """
    if path == STANDARD_STREAM:
        output.write_data(text + "\n")
        return
    from pipetransformer.core import text_files

    text_files.write(path, text + "\n")


@contextlib.contextmanager
def named(path: str, text: str = "", wanted: str = "") -> Iterator[None]:
    """Name the file in errors of its content, and what it is if that is another kind.

    Args:
        path: of the file.
        text: its content.
        wanted: the kind that is read.
    """
    try:
        yield
    except ValueError as error:
        name = "standard input" if path == STANDARD_STREAM else path
        kind = _kind_of(text)
        other = kind not in ("", wanted)
        told = f"expected a {wanted}, got a {kind}" if other else str(error)
        raise ValueError(f"{name}: {told}") from None


def _kind_of(text: str) -> str:
    """Return which file a text is by a field that no other kind has; empty: none."""
    fields = _fields(text)
    if _is_kept(fields):
        return "profile that a run has kept"
    own = (("layers", "profile"), ("devices_per_node", "cluster"), ("cuts", "plan"))
    found = [kind for field, kind in own if field in fields]
    return found[0] if len(found) == 1 else ""


def _is_kept(fields: dict[str, Any]) -> bool:
    return "conditions" in fields and isinstance(fields.get("profile"), dict)


def _fields(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object; none of any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
