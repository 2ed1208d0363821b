"""Whether the current call is a checkpointed forward or its recomputation."""

from pipetransformer import _C


def is_checkpointing() -> bool:
    """True in the forward of a checkpointed cell, in this thread."""
    return bool(_C.pipe.is_checkpointing())


def is_recomputing() -> bool:
    """True in the recomputation of a checkpointed cell, in this thread."""
    return bool(_C.pipe.is_recomputing())
