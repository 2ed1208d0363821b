"""Stands for ``torchgpipe.balance.profile``."""

from pipetransformer.pipe.balance.profile import layerwise_sandbox

__all__ = ["layerwise_sandbox"]
