"""The C++ side of this room; the only file here that imports the extension."""

from pipetransformer import _C  # noqa: F401  # loads the extension
from pipetransformer._C import (
    ActiveGroup,
    ControlPlane,
    Failure,
    LivenessTracker,
    PlanTransition,
    RendezvousBoard,
    StoreSeal,
    announced_epoch,
    broadcast_tensors,
    hash_replica_tensors,
    plain_text,
    raise_failures_as,
    wait_done,
)

__all__ = [
    "ActiveGroup",
    "Failure",
    "LivenessTracker",
    "ControlPlane",
    "PlanTransition",
    "RendezvousBoard",
    "StoreSeal",
    "announced_epoch",
    "broadcast_tensors",
    "hash_replica_tensors",
    "plain_text",
    "raise_failures_as",
    "wait_done",
]
