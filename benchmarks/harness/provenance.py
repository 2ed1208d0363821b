"""Where a result comes from: commit, command, and what others did meanwhile.

A script calls `begin` before it measures anything and hands what it gets to
``write_json``, which asks `provenance` for the sections of the result file.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.child import cpu_of_descendants_s, foreign_cpu_s, machine_busy_s
from harness.git import git, is_checkout

ROOT = Path(__file__).resolve().parents[2]
# What a measurement itself writes, and the pages that are rendered from it.
WRITTEN = ("benchmarks/results", "docs/results", "README.md")
SHOWN = 5


@dataclass(frozen=True)
class Tree:
    """The state of the source tree.

    Attributes:
        commit: Checked out; None without git.
        changed: Paths that differ from it, untracked ones included, but not what
            measurements write (`WRITTEN`) and not what git ignores.
    """

    commit: str | None
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """The moment before the first measurement.

    Attributes:
        tree: What is measured.
        wall_s: Clock.
        cpu_s: Used by this process and its children.
        busy_s: Used on the machine; None where unknown.
        kept_share: Of the machine's CPU time that went to others during runs that were
            made before and are kept; None: there are none.
    """

    tree: Tree
    wall_s: float
    cpu_s: float
    busy_s: float | None
    kept_share: float | None = None


def begin(root: Path = ROOT) -> Start:
    """Note the tree and the clocks; call it before anything is measured.

    Args:
        root: Of the source tree.
    """
    tree = tree_of(root)
    if tree.commit is None or tree.changed:
        print(f"not for publication: {_complaint(tree)}", file=sys.stderr)
    return Start(tree, time.monotonic(), own_cpu_s(), machine_busy_s())


def provenance(start: Start, root: Path = ROOT) -> dict[str, object]:
    """Return commit, dirty flag, command line, duration and the share of others.

    ``dirty`` is None without git. A tree is dirty if it was changed when the
    measurement began or when it ended, or if the commit is another one at the end.

    Args:
        start: What `begin` returned.
        root: Of the source tree.
    """
    end = tree_of(root)
    changed = sorted({*start.tree.changed, *end.changed})
    moved = end.commit != start.tree.commit
    known = start.tree.commit is not None
    return {
        "commit": start.tree.commit,
        "dirty": bool(changed) or moved if known else None,
        "changed": changed,
        "command": command(),
        "took_s": time.monotonic() - start.wall_s,
        "foreign_share": (
            _foreign_share(start) if start.kept_share is None else start.kept_share
        ),
    }


def command() -> str:
    """Return this process's command line; the interpreter is named ``python``."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def tree_of(root: Path) -> Tree:
    """Return the state of a source tree.

    Args:
        root: Its top folder; a folder within another repository has no commit.
    """
    if not is_checkout(root):
        return Tree(None, ())
    commit = git(root, "rev-parse", "HEAD")
    left_out = [f":(exclude){path}" for path in WRITTEN]
    status = ("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    found = git(root, *status, "--", ".", *left_out)
    if commit is None or found is None:
        return Tree(None, ())
    return Tree(
        commit.strip(), tuple(entry[3:] for entry in found.split("\0") if entry)
    )


def own_cpu_s() -> float:
    """Return the CPU seconds of this process and of all its children so far.

    Processes that lost their parent are not in it: they look like others'.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + cpu_of_descendants_s(os.getpid())


def _foreign_share(start: Start) -> float | None:
    """Share of the machine's CPU time that went to others since the start."""
    wall_s = time.monotonic() - start.wall_s
    own_s = own_cpu_s() - start.cpu_s
    foreign_s = foreign_cpu_s(start.busy_s, machine_busy_s(), wall_s, own_s)
    return None if foreign_s is None else foreign_s / ((os.cpu_count() or 1) * wall_s)


def _complaint(tree: Tree) -> str:
    if tree.commit is None:
        return "expected a git checkout, got none"
    names = [*tree.changed[:SHOWN], *(["..."] if len(tree.changed) > SHOWN else [])]
    return f"expected a clean tree, got changes of {', '.join(names)}"
