"""Stands for ``torch.distributed.pipeline.sync.skip.namespace``."""

from pipetransformer.pipe.skip import Namespace

__all__ = ["Namespace"]
