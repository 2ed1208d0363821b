"""Stands for ``torch.distributed.pipeline.sync._balance.profile``."""

from pipetransformer.pipe.balance.profile import (
    layerwise_sandbox,
    profile_sizes,
    profile_times,
)

__all__ = ["layerwise_sandbox", "profile_sizes", "profile_times"]
