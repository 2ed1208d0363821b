"""Stands for ``torch.distributed.pipeline.sync.pipe``."""

from pipetransformer.pipe import NoChunk, Pipe, PipeSequential, WithDevice


class BalanceError(ValueError):
    """Never raised; kept for scripts that import it."""


__all__ = ["BalanceError", "NoChunk", "Pipe", "PipeSequential", "WithDevice"]
