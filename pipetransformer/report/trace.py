"""A rank's run as a timeline for Perfetto: Chrome's JSON trace format."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator
from typing import TypeAlias

MOST = 200_000
"""Cells, and phases, that a trace holds: the last so many."""

_KINDS = {
    "F": "forward",
    "R": "forward again",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "P": "frozen layers",
}
_STAGES = 10  # number of the first stage's lane, behind the process's
_WORKERS = 1 << 20  # of the first worker's, behind those of all stages
_SPARE = "P"

Cell: TypeAlias = tuple[str, int, int, int, int]
"""Kind, stage, micro-batch, begin and end in ns of the monotonic clock."""


def _lane(kind: str, stage: int) -> tuple[int, str]:
    """Return the number and the name of the lane of a cell, or of spare work."""
    if kind == _SPARE:  # a worker is that of its stage, but for serial pipelines
        return _WORKERS + stage, f"bubbles of stage {stage}"
    return _STAGES + stage, f"stage {stage}"


class Timeline:
    """What ran when on one rank.

    Args:
        rank: The rank.
        origin_s: A ``time.perf_counter()`` from which times are counted.
    """

    def __init__(self, rank: int, origin_s: float) -> None:
        self._rank = rank
        self._origin_ns = round(origin_s * 1e9)
        self._phases: collections.deque[tuple[str, float, float]]
        self._phases = collections.deque(maxlen=MOST)
        self._cells: collections.deque[Cell] = collections.deque(maxlen=MOST)
        self._left_out = 0

    def add_phase(self, name: str, begin_s: float, end_s: float) -> None:
        """Note a phase of the process, or an event; what `Clock.sink` calls."""
        self._phases.append((name, begin_s, end_s))

    def add_cells(self, cells: Iterable[Cell], left_out: int) -> None:
        """Note cells of the pipeline, and how many there were before them."""
        self._cells.extend(cells)
        self._left_out += left_out

    def to_json(self) -> str:
        """Return the timeline as text."""
        document = {
            "displayTimeUnit": "ms",
            "otherData": {
                "simulated": False,
                "rank": self._rank,
                "cells_left_out": self._left_out,
            },
            "traceEvents": [*self._lanes(), *self._events()],
        }
        return json.dumps(document, separators=(",", ":"))

    def _lanes(self) -> Iterator[dict[str, object]]:
        yield self._named("process_name", 0, {"name": f"rank {self._rank}"})
        lanes = {_lane(kind, stage) for kind, stage, *_ in self._cells}
        for number, name in [(0, "process"), *sorted(lanes)]:
            yield self._named("thread_name", number, {"name": name})
            yield self._named("thread_sort_index", number, {"sort_index": number})

    def _named(self, what: str, lane: int, told: object) -> dict[str, object]:
        return {"ph": "M", "pid": self._rank, "tid": lane, "name": what, "args": told}

    def _events(self) -> Iterator[dict[str, object]]:
        for name, begin_s, end_s in self._phases:
            begin_ns, end_ns = round(begin_s * 1e9), round(end_s * 1e9)
            if begin_s < end_s:
                yield self._slice(0, name, "phase", begin_ns, end_ns)
            else:
                yield self._mark(name, begin_ns)
        for kind, stage, microbatch, begin_ns, end_ns in self._cells:
            (lane, _), name = _lane(kind, stage), f"{kind}{microbatch}"
            yield self._slice(lane, name, _KINDS[kind], begin_ns, end_ns)

    def _mark(self, text: str, at_ns: int) -> dict[str, object]:
        return {
            "ph": "i",
            "s": "p",  # drawn through all lanes of the process
            "pid": self._rank,
            "tid": 0,
            "name": text,
            "cat": "event",
            "ts": (at_ns - self._origin_ns) / 1000,
        }

    def _slice(
        self, lane: int, name: str, category: str, begin_ns: int, end_ns: int
    ) -> dict[str, object]:
        return {
            "ph": "X",
            "pid": self._rank,
            "tid": lane,
            "name": name,
            "cat": category,
            "ts": (begin_ns - self._origin_ns) / 1000,
            "dur": (end_ns - begin_ns) / 1000,
        }
