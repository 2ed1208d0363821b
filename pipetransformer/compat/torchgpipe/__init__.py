"""torchgpipe's interface; also ``import torchgpipe`` after ``install``."""

from pipetransformer.pipe import GPipe, is_checkpointing, is_recomputing

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]
