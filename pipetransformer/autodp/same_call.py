"""Exchanges between ranks that say at which call each of them is.

All active ranks run the same script. Where one of them is at another call, such as an
evaluation that it makes alone, it would take what the others say of theirs for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipetransformer import _C

_LONGEST_CALL = 60  # bytes


class Members(Protocol):
    """What is needed of an `ActiveGroup`."""

    members: tuple[int, ...]

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Exchange one byte string per member."""
        ...


def gather_at(group: Members, call: str, value: bytes) -> list[bytes]:
    """Exchange one byte string of any length per member; collective.

    Args:
        group: The members.
        call: What all of them are at, for people; at most 60 bytes.
        value: This member's.

    Returns:
        The members' values, in the order of the group.

    Raises:
        RuntimeError: members are at other calls; on every member.
    """
    return values_at(call, group.all_gather_bytes(said_at(call, value)), group)


def said_at(call: str, value: bytes) -> bytes:
    """Return what a member says that is at a call; see `gather_at`."""
    return call.encode() + b"\0" + value


def values_at(call: str, told: Sequence[bytes], group: Members) -> list[bytes]:
    """Return the values of what members have said; see `gather_at`."""
    head = said_at(call, b"")
    if all(part.startswith(head) for part in told):
        return [part[len(head) :] for part in told]
    where = ", ".join(
        f"rank {member} at {_call_of(part)}"
        for member, part in zip(group.members, told, strict=True)
    )
    raise RuntimeError(
        f"calls of the active ranks: expected every rank to run the same script, got "
        f"{where}; call what ranks do together, such as evaluate, on all of them"
    )


def _call_of(part: bytes) -> str:
    call, found, _ = part[: _LONGEST_CALL + 1].partition(b"\0")
    return f"'{_C.core.plain_text(call)}'" if found else "another call"
