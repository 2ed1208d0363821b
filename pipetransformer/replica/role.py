"""This rank's present place: lead, other active rank, or standby."""

from __future__ import annotations

from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run


class Role:
    """What this rank drives under the plan in force.

    Before the first plan rank 0 leads alone and every other rank stands by.

    Args:
        run: The run.

    Attributes:
        replica: What this rank drives; None on a standby.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.replica: Replica | None = None

    @property
    def is_lead(self) -> bool:
        """True on the rank that writes messages, plans and files."""
        return self._run.is_lead

    @property
    def stands_by(self) -> bool:
        """True on a rank that follows the lead's messages."""
        return self.replica is None and not self.is_lead

    def active(self) -> Replica:
        """Return this rank's replica.

        Raises:
            ValueError: the rank stands by, or no plan is in force.
        """
        if self.replica is None:
            raise ValueError(
                f"rank {self._run.info.rank}: expected an active rank, got a standby "
                "(batches yields nothing there) or a call before the first pass "
                "(engine.prepare makes the plan without one)"
            )
        return self.replica

    def retire(self) -> None:
        """Drop the replica and all groups; safe after a failure."""
        if self.replica is not None:
            self.replica.retire(keep_group=False)
            self.replica = None
        self._run.groups.drop()
