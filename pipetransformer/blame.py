"""Finds the ranks because of which a change of plan was aborted.

Members of a new group wait for each other while they connect it. So one rank that
never comes keeps all others from acknowledging, and neither a missing acknowledgement
nor an error of the connection tells who it was. Every rank therefore says first that
it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.autodp import MessagePlane

_KEPT_EPOCHS = 2
_OK = b"ok"
_PEERS = "peers did not connect: "


def _key(epoch: int, rank: int) -> str:
    return f"here/{epoch}/{rank}"


def arrive(plane: MessagePlane, epoch: int) -> None:
    """Say that this rank has seen the plan; forget what it said of older ones."""
    plane.publish(_key(epoch, plane.rank), b"1")
    plane.delete(_key(epoch - _KEPT_EPOCHS - 1, plane.rank))


def is_open(plane: MessagePlane, epoch: int) -> bool:
    """Tell whether the decision is still to be made: a late rank need not prepare."""
    return plane.read(f"decision/{epoch}") is None


def refusal(error: BaseException) -> str:
    """Return the text by which this rank refuses a plan."""
    text = f"{type(error).__name__}: {error}"
    # Errors that name what was expected of others: `build_group`, `GroupCache`.
    others = ("to connect within", "expected a kept one of ranks")
    return _PEERS + text if any(part in str(error) for part in others) else text


def culprits(
    plane: MessagePlane, epoch: int, participants: Sequence[int]
) -> tuple[int, ...]:
    """Return who never came, and who refused for a reason of its own."""
    found = []
    for rank in participants:
        if plane.read(_key(epoch, rank)) is None:
            found.append(rank)
            continue
        answer = plane.read(f"ack/{epoch}/{rank}")
        refused = answer is not None and answer != _OK
        if refused and not (answer or b"").startswith(_PEERS.encode()):
            found.append(rank)
    return tuple(found)
