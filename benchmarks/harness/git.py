"""Asks git about the source tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

TIMEOUT_S = 60.0


def git(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None if there is no git, or its status is not 0.

    Args:
        root: Where to run it.
        arguments: Of git.
    """
    line = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def is_checkout(root: Path) -> bool:
    """Return whether a folder is the top of a git checkout.

    A source tree that was unpacked within another repository is none.
    """
    top = git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(top.strip()).resolve() == root.resolve()
