"""A simulated step as a file for Perfetto: Chrome's JSON trace format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from pipetransformer.simulator.event import Event

_NAMES = {
    "F": "forward",
    "R": "forward again",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "P": "frozen layers",
    "C": "copy",
    "A": "all-reduce",
    "H": "cache read",
    "O": "optimizer",
}

# Lanes behind those of all stages.
_SHARED = {"network": 1 << 30, "cache": (1 << 30) + 1}


def text(events: Sequence[Event], title: str) -> str:
    """Return the events as JSON."""
    document = {
        "displayTimeUnit": "ns",
        "otherData": {"simulated": True, "plan": title},
        "traceEvents": [*_lanes(events, title), *map(_slice, events)],
    }
    return json.dumps(document)


def _lane(event: Event) -> tuple[int, str]:
    """Where an event is drawn: a number that orders the lanes, and a name."""
    if event.resource in _SHARED:
        return _SHARED[event.resource], event.resource
    backward = event.direction == "<"
    lane, what = {
        "compute": (0, ""),
        "copy engine": (2, ", gradients in") if backward else (1, ", activations in"),
        "device link": (3, ", all-reduce in the node"),
    }[event.resource]
    return 4 * event.stage + lane, f"stage {event.stage}{what}"


def _lanes(events: Sequence[Event], title: str) -> Iterator[dict[str, object]]:
    yield {
        "ph": "M",
        "pid": 0,
        "name": "process_name",
        "args": {"name": f"simulated: {title}"},
    }
    for number, name in sorted({_lane(event) for event in events}):
        for key, value in (
            ("thread_name", {"name": name}),
            ("thread_sort_index", {"sort_index": number}),
        ):
            yield {"ph": "M", "pid": 0, "tid": number, "name": key, "args": value}


def _slice(event: Event) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": _lane(event)[0],
        "name": event.name,
        "cat": _NAMES[event.kind],
        "ts": event.begin_ns / 1000,
        "dur": (event.end_ns - event.begin_ns) / 1000,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
    }
