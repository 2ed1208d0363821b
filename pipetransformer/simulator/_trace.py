"""A simulated step as a file for Perfetto: Chrome's JSON trace format."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from pipetransformer.simulator.event import COMPUTE_KINDS, Event

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
    "E": "cache write",
    "O": "optimizer",
}


def write(path: pathlib.Path, events: Sequence[Event], title: str) -> None:
    """Write the events; the file appears as a whole, readable by its owner only."""
    document = {
        "displayTimeUnit": "ns",
        "otherData": {"simulated": True, "plan": title},
        "traceEvents": [*_lanes(events, title), *map(_slice, events)],
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _lane(event: Event) -> tuple[int, str]:
    """Where an event is drawn: a number that orders the lanes, and a name."""
    if event.kind == "A":
        return 1_000_000_000, "network"
    if event.kind in "HE":
        return 1_000_000_001, "cache"
    if event.kind in COMPUTE_KINDS:
        return 3 * event.stage, f"stage {event.stage}"
    backward = event.direction == "<"
    lane = 3 * event.stage + (2 if backward else 1)
    what = "gradients" if backward else "activations"
    return lane, f"stage {event.stage}, {what} in"


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
