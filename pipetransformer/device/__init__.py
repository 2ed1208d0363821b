"""Copies between host and devices beside the work queued there, and its times."""

from pipetransformer.device.host_copies import LaterNumber, bring, wait_for_queued
from pipetransformer.device.stream_times import StreamTimes

__all__ = ["LaterNumber", "StreamTimes", "bring", "wait_for_queued"]
