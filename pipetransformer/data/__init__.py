"""Samples to batches: who loads which, in which order, and structures of tensors."""

from pipetransformer.data.loading import Batch

__all__ = ["Batch"]
