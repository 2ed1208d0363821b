"""How old a result is, counted in commits to what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.git import git, is_checkout


@dataclass(frozen=True)
class Age:
    """The commits after a measurement.

    Attributes:
        newer: Later commits to what was measured; None where that is unknown.
        why: Why it is unknown.
        foreign: Whether the history is known and the measured commit is not in it.
    """

    newer: int | None
    why: str = ""
    foreign: bool = False

    def __str__(self) -> str:
        """Return a line for people."""
        if self.newer is None:
            return f"newer commits to what it measures cannot be counted: {self.why}"
        return f"{self.newer} newer commits to what it measures"


def age(root: Path, commit: str, paths: Sequence[str]) -> Age:
    """Count the commits after a measurement that changed what was measured.

    A clone without its whole history may not know the commit, and a source tree
    without git knows none: then nothing can be said. Where the history is whole the
    commit must be in it.

    Args:
        root: Top folder of the source tree.
        commit: Measured.
        paths: Of what was measured.
    """
    if not is_checkout(root):
        return Age(None, "no git checkout")
    if git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        if git(root, "rev-parse", "--is-shallow-repository") == "true\n":
            return Age(None, f"{commit[:7]} is not in this shallow clone")
        return Age(None, f"expected a commit of this history, got {commit}", True)
    count = git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *paths)
    if count is None:
        return Age(None, "git could not list the commits")
    return Age(int(count))
