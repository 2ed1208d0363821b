"""The one error that users see when a peer, or the store, is gone."""

from __future__ import annotations

import functools

from pipetransformer import _C


class PeerFailure(RuntimeError):
    """A rank died, stopped, was told to end, or ended with an error of its own.

    C++ raises it, too: from its waits, and from the collectives of active groups.

    Args:
        rank: the rank held responsible; None when it is not known.
        phase: what was going on, e.g. ``"heartbeat"`` or ``"all_reduce"``.
        epoch: plan epoch, None before the first plan.
        deadline_s: the deadline that passed in seconds, None when none did.
        reason: one sentence for people.
    """

    def __init__(
        self,
        rank: int | None,
        phase: str,
        *,
        epoch: int | None = None,
        deadline_s: float | None = None,
        reason: str,
    ) -> None:
        failure = _C.autodp.Failure(
            rank, phase, epoch=epoch, deadline_s=deadline_s, reason=reason
        )
        self.rank = failure.rank
        self.phase = failure.phase
        self.epoch = failure.epoch
        self.deadline_s = failure.deadline_s
        self.reason = failure.reason
        super().__init__(str(failure))

    @classmethod
    def of(cls, failure: _C.autodp.Failure) -> PeerFailure:
        """Build the error of a failure that C++ knows."""
        return cls(
            failure.rank,
            failure.phase,
            epoch=failure.epoch,
            deadline_s=failure.deadline_s,
            reason=failure.reason,
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Make the error cross process boundaries with all of its fields."""
        make = functools.partial(
            PeerFailure,
            self.rank,
            self.phase,
            epoch=self.epoch,
            deadline_s=self.deadline_s,
            reason=self.reason,
        )
        return make, ()


_C.autodp.raise_failures_as(PeerFailure.of)
