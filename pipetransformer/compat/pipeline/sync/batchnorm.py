"""Stands for ``torch.distributed.pipeline.sync.batchnorm``."""

from pipetransformer.pipe import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
