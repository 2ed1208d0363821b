"""Times a call: by the clock on CPU, by events where work is queued on a stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Stream

# Calls a function, returns its nanoseconds and its result.
Stopwatch: TypeAlias = Callable[[Callable[[], object]], tuple[int, object]]


def stopwatch(device: torch.device) -> Stopwatch:
    """Return what times work on ``device``."""
    if device.type == "cpu":
        return time_by_clock

    def by_events(fn: Callable[[], object]) -> tuple[int, object]:
        return time_by_events(
            fn,
            lambda: torch.Event(device, enable_timing=True),
            lambda: torch.accelerator.current_stream(device),
        )

    return by_events


def time_by_clock(fn: Callable[[], object]) -> tuple[int, object]:
    """Time a call that is done when it returns."""
    start = time.perf_counter_ns()
    result = fn()
    return time.perf_counter_ns() - start, result


def time_by_events(
    fn: Callable[[], object],
    make_event: Callable[[], torch.Event],
    current_stream: Callable[[], Stream],
) -> tuple[int, object]:
    """Time what a call puts on the current stream.

    The first event waits behind the work that is already queued, so that work does
    not count; what the device idles while the call queues does, as in a run. Waits
    for the end: the next call starts on an idle device.

    Args:
        fn: the call.
        make_event: makes an event with timing.
        current_stream: returns the stream that ``fn`` works on.

    Returns:
        Nanoseconds on the device, and the result of ``fn``.
    """
    start, end = make_event(), make_event()
    start.record(current_stream())
    result = fn()
    end.record(current_stream())
    end.synchronize()
    return round(start.elapsed_time(end) * 1e6), result
