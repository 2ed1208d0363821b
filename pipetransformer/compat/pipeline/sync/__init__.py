"""Stands for ``torch.distributed.pipeline.sync``."""

from pipetransformer.pipe import Pipe, is_checkpointing, is_recomputing

# Importable, though no part of the old `__all__`.
from pipetransformer.pipe import WithDevice as WithDevice

__all__ = ["Pipe", "is_checkpointing", "is_recomputing"]
