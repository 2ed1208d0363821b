"""Copies between the host and devices beside the work that is queued there."""

from pipetransformer.device.host_copies import LaterNumber, bring, wait_for_queued

__all__ = ["LaterNumber", "bring", "wait_for_queued"]
