"""Stands for ``torch.distributed.pipeline.sync.skip.tracker``."""

from pipetransformer.skip.tracker import (
    SkipTracker,
    current_skip_tracker,
    use_skip_tracker,
)

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]
