"""The C++ side of this room; the only file here that imports the extension."""

from pipetransformer import _C  # noqa: F401  # loads the extension
from pipetransformer._C import (
    ActiveGroup,
    LivenessTracker,
    MessagePlane,
    PlanTransition,
    RollBoard,
    StoreSeal,
    broadcast_tensors,
    hash_replica_tensors,
    head_epoch,
    plain_text,
    plane_advance,
    plane_ended,
    plane_generation,
    plane_group_store,
    plane_outlive_store,
    plane_store_loss,
    wait_done,
)

__all__ = [
    "ActiveGroup",
    "LivenessTracker",
    "MessagePlane",
    "PlanTransition",
    "RollBoard",
    "StoreSeal",
    "broadcast_tensors",
    "hash_replica_tensors",
    "head_epoch",
    "plain_text",
    "plane_advance",
    "plane_ended",
    "plane_generation",
    "plane_group_store",
    "plane_outlive_store",
    "plane_store_loss",
    "wait_done",
]
