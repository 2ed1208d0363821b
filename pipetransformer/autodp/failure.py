"""The one error that users see when a peer, or the store, is gone."""

from __future__ import annotations

FailureTuple = tuple[int, str, int, float, str]
"""How a failure crosses to C++: rank, phase, epoch, deadline_s, reason; -1: none."""


class PeerFailure(RuntimeError):
    """A rank died, stopped, was told to end, or ended with an error of its own.

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
        self.rank = rank
        self.phase = phase
        self.epoch = epoch
        self.deadline_s = deadline_s
        self.reason = " ".join(reason.split())
        parts = ["rank unknown" if rank is None else f"rank {rank}", f"phase '{phase}'"]
        if epoch is not None:
            parts.append(f"plan epoch {epoch}")
        if deadline_s is not None:
            parts.append(f"deadline {deadline_s:.1f} s")
        super().__init__(f"peer failure: {', '.join(parts)}: {self.reason}")

    def __reduce__(self) -> tuple[object, ...]:
        """Make the error cross process boundaries with all of its fields."""
        return _rebuild, (
            self.rank,
            self.phase,
            self.epoch,
            self.deadline_s,
            self.reason,
        )

    @classmethod
    def from_tuple(cls, failure: FailureTuple) -> PeerFailure:
        """Build the error from what C++ latched."""
        rank, phase, epoch, deadline_s, reason = failure
        return cls(
            rank if rank >= 0 else None,
            phase,
            epoch=epoch if epoch >= 0 else None,
            deadline_s=deadline_s if deadline_s >= 0 else None,
            reason=reason,
        )

    def to_tuple(self) -> FailureTuple:
        """Return the form that C++ latches."""
        return (
            -1 if self.rank is None else self.rank,
            _utf8(self.phase),
            -1 if self.epoch is None else self.epoch,
            -1.0 if self.deadline_s is None else self.deadline_s,
            _utf8(self.reason),
        )


def _utf8(text: str) -> str:
    """Return a text that UTF-8 can express: names of files may have surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _rebuild(
    rank: int | None,
    phase: str,
    epoch: int | None,
    deadline_s: float | None,
    reason: str,
) -> PeerFailure:
    return PeerFailure(rank, phase, epoch=epoch, deadline_s=deadline_s, reason=reason)
