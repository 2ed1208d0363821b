"""Stands for ``torch.distributed.pipeline.sync.utils``."""

from pipetransformer.pipe import partition_model

__all__ = ["partition_model"]
