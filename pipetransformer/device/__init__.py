"""Copies between the host and devices beside the work that is queued there."""

from pipetransformer.device.host_copies import LaterNumber, bring

__all__ = ["LaterNumber", "bring"]
