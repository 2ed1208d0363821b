"""Repeats a measurement while other programs use the processors."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.child import machine_busy_s
from harness.timing import Sample

_T = TypeVar("_T")

PAUSE_S = 1.0
QUIET = 0.15  # of the cores, used by others


@dataclass(frozen=True)
class Attempt(Generic[_T]):
    """What was measured once, and what happened meanwhile.

    Attributes:
        value: What was measured.
        others_share: Share of the cores that others used; None: unknown.
        sample: How it was timed; what others used is not in it, since it is judged
            here.
    """

    value: _T
    others_share: float | None
    sample: Sample

    @property
    def why_dropped(self) -> str:
        """Why another attempt was made."""
        return f"others used {self.others_share or 0:.0%} of the cores"


@dataclass(frozen=True)
class Measured(Attempt[_T]):
    """The attempt that counts.

    Attributes:
        dropped: The attempts before it.
    """

    dropped: tuple[Attempt[_T], ...]


def others_share(busy_s: float | None, wall_s: float, cpu_s: float) -> float | None:
    """Return the share of the cores that went to other programs.

    Args:
        busy_s: Of the whole machine; None: not known.
        wall_s: Elapsed.
        cpu_s: Of this process.
    """
    if busy_s is None or not wall_s > 0:
        return None
    return max(0.0, busy_s - cpu_s) / ((os.cpu_count() or 1) * wall_s)


def when_quiet(measure: Callable[[], _T], *, patience_s: float) -> Measured[_T]:
    """Measure, again after a pause if others were busy, until patience is out.

    The share of others is counted in ticks of 10 ms per core: measure for some tenths
    of a second at least.

    Args:
        measure: The measurement.
        patience_s: Seconds after which the result is taken as it is.
    """
    deadline = time.perf_counter() + patience_s
    dropped: list[Attempt[_T]] = []
    while True:
        busy, wall, cpu = machine_busy_s(), time.perf_counter(), time.process_time()
        value = measure()
        wall_s = time.perf_counter() - wall
        cpu_s, after = time.process_time() - cpu, machine_busy_s()
        known = busy is not None and after is not None
        share = others_share(after - busy if known else None, wall_s, cpu_s)  # type: ignore[operator]
        late = time.perf_counter() + PAUSE_S > deadline
        sample = Sample(wall_s, cpu_s)
        if late or share is None or share <= QUIET:
            return Measured(value, share, sample, tuple(dropped))
        dropped.append(Attempt(value, share, sample))
        time.sleep(PAUSE_S)


def add_patience_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--patience``."""
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="measure again for S seconds while others use the processors",
    )
