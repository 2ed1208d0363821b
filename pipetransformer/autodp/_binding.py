"""The C++ side of this room; the only file here that imports the extension."""

from pipetransformer import _C  # noqa: F401  # loads the extension
from pipetransformer._C import (
    ActiveGroup,
    DecisionMachine,
    MessagePlane,
    broadcast_tensors,
    hash_replica_tensor,
    wait_done,
)

__all__ = [
    "ActiveGroup",
    "DecisionMachine",
    "MessagePlane",
    "broadcast_tensors",
    "hash_replica_tensor",
    "wait_done",
]
