"""Stands for ``torch.distributed.pipeline.sync.checkpoint``: the two flags."""

from pipetransformer.pipe import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
