"""Skip connections in a pipeline; the names of room ``skip`` under their old path."""

from pipetransformer.skip import (
    Namespace,
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = [
    "Namespace",
    "Skippable",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
