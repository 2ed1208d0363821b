"""Stands for ``torch.distributed.pipeline.sync``."""

from pipetransformer.pipe import NoChunk as NoChunk
from pipetransformer.pipe import Pipe, is_checkpointing, is_recomputing
from pipetransformer.pipe import WithDevice as WithDevice

# The other two are importable, though no part of the old list.
__all__ = ["Pipe", "is_checkpointing", "is_recomputing"]
