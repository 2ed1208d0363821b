"""Counts of what a run did on one rank, beside the records of single events."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Counters:
    """Counts since the engine was opened; the lead's are in the summary.

    Attributes:
        transformations_committed: Changes of plan carried out, the first plan included.
        transformations_aborted: Attempts that ended in ABORT.
        groups_built: Groups of two or more members that were connected.
        groups_reused: Kept groups that came into use again.
        bytes_moved: State sent to new replicas, or received.
        checkpoints_written: Checkpoints saved.
        store_operations: Operations on the store, each look of a wait included; a look
            at several keys is one. Beats are not among them.
        failures_survived: Lost ranks that the run went on without.
    """

    transformations_committed: int = 0
    transformations_aborted: int = 0
    groups_built: int = 0
    groups_reused: int = 0
    bytes_moved: int = 0
    checkpoints_written: int = 0
    store_operations: int = 0
    failures_survived: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the counts in the summary's format."""
        return dataclasses.asdict(self)
