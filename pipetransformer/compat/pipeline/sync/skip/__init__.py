"""Stands for ``torch.distributed.pipeline.sync.skip``."""

from pipetransformer.pipe.skip import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
