"""Whether a measurement's result still stands, or must be taken again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.age import age
from harness.commands import RESULTS, Command

STATUS = "exit_status"  # of a command that ended with another than 0


def result_of(command: Command, root: Path) -> dict[str, Any] | None:
    """Return the content of a command's result file; None where there is none to read.

    Args:
        command: Of the table.
        root: Top folder of the source tree.
    """
    try:
        content = json.loads((root / RESULTS / f"{command.name}.json").read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def note_failure(command: Command, status: int, since: float, root: Path) -> None:
    """Write a command's exit status into the result file that it has left all the same.

    Args:
        command: Of the table.
        status: Not 0.
        since: When it began, as ``time.time()``: an older file is not its own.
        root: Top folder of the source tree.
    """
    path, content = root / RESULTS / f"{command.name}.json", result_of(command, root)
    if content is not None and path.stat().st_mtime >= since:
        text = json.dumps({**content, STATUS: status}, indent=1, allow_nan=False)
        path.write_text(text + "\n")


def why_again(command: Command, content: Mapping[str, Any] | None, root: Path) -> str:
    """Say why a measurement must be taken; empty: its result stands.

    It stands where the same command took it whole and ended well, of a clean tree, and
    no commit since has changed what it measures.

    Args:
        command: Of the table.
        content: Its result file's; None: there is none.
        root: Top folder of the source tree.
    """
    if content is None:
        return "not measured"
    if content.get("dirty") is not False or content.get("quick") is not False:
        return "not for publication"
    if content.get("command") != command.line:
        return "of another command"
    if status := content.get(STATUS):
        return f"ended with {status}"
    if lacking := seeds_to_come(content):
        return f"not whole: {lacking}"
    commits = content.get("commits") or [content["commit"]]
    ages = [age(root, commit, command.measures) for commit in commits]
    return next((str(each) for each in ages if each.newer != 0), "")


def seeds_to_come(content: Mapping[str, Any]) -> str:
    """Say what a result that is made in sittings lacks; empty: nothing."""
    seeds = content.get("seeds")
    return "; ".join(
        f"{task}: {count} of {seeds} seeds"
        for task, count in content.get("seeds_so_far", {}).items()
        if count < seeds
    )
