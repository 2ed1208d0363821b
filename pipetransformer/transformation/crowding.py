"""How much the slots of a host slow each other, measured with all of them busy.

Slots share cores, memory and caches. The lead times its layers alone, unless it knows
that from their profile, and then while every other rank of its node runs them, too.
Ranks of other nodes are left alone: theirs are taken to be like the lead's.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from datetime import timedelta

from pipetransformer.run.context import Run

_LOG = logging.getLogger(__name__)

_ALL = 0.98  # of the slots' speed, from which on they share nothing
_LEAST_WAIT = timedelta(seconds=10)  # for the others' first run

# A scheduler's slices of time are some ms: a mean of three short runs is one of few.
_TIME = 0.2  # s
_MOST_RUNS = 500

Work = Callable[[], float]
"""Runs the layers once; returns the seconds."""

MakeWork = Callable[[int], Work]
"""Makes the work of a micro-batch of so many rows."""


def _key(run: Run, part: str) -> str:
    """Return a key of this attempt: when it is made again, fewer ranks are there."""
    return f"busy/{len(run.plane.members)}/{part}"


def _others(run: Run) -> list[int]:
    """Return the living ranks of this rank's node, itself left out."""
    info = run.info
    first = info.node * info.local_world_size
    local = range(first, first + info.local_world_size)
    return [r for r in run.plane.members if r in local and r != info.rank]


def measure_cores(
    run: Run,
    make_work: MakeWork,
    rows: int,
    alone_s: float | None,
    usable_permille: int,
) -> int:
    """Return how many slots work at full speed together, in thousandths; on the lead.

    Args:
        run: The run, of slots of the host.
        make_work: Makes the lead's work.
        rows: Of what every slot works on.
        alone_s: Seconds of the lead's work while the others rest; None: to be measured.
        usable_permille: What the job's cores say, 0 for all slots; an upper bound.

    Raises:
        PeerFailure: a rank was lost meanwhile.
    """
    others = _others(run)
    if not others:
        return usable_permille
    work = make_work(rows)
    if alone_s is None:
        work()  # it may pay for memory that is new to it
        alone_s = _mean(work)
    run.plane.publish(_key(run, "ask"), str(rows).encode())
    work()  # while the others prepare theirs
    keys = [_key(run, str(rank)) for rank in others]
    # The first run may take twice as long, and all of them share the cores.
    wait = max(_LEAST_WAIT, 4 * (len(others) + 1) * timedelta(seconds=alone_s))
    if run.plane.wait_any([keys], timeout=wait) is None:
        _LOG.warning("slots are not measured together: ranks %s did not come", others)
        return usable_permille
    slots = 1000 * (len(others) + 1)
    found = max(1000, round(slots * min(1.0, alone_s / _mean(work))))
    if usable_permille:
        return min(found, usable_permille)
    return found if found < _ALL * slots else 0


def _mean(work: Work) -> float:
    """Return the mean of runs that last long enough for slots to take turns in."""
    taken = [work()]
    while sum(taken) + taken[-1] / 2 < _TIME and len(taken) < _MOST_RUNS:
        taken.append(work())
    return statistics.fmean(taken)


def keep_busy(run: Run, make_work: MakeWork) -> None:
    """Work while the lead measures; until the profile is there, on any other rank.

    Args:
        run: The run.
        make_work: Makes this rank's work, once it is asked for.

    Raises:
        PeerFailure: a rank was lost meanwhile.
    """
    lead_node = min(run.plane.members) // run.info.local_world_size
    ask = _key(run, "ask")
    if run.plane.wait_any([["profile"], [ask]]) == 0 or run.info.node != lead_node:
        return
    work = make_work(int(run.plane.read(ask) or 1))
    work()
    run.plane.publish(_key(run, str(run.info.rank)), b"")
    while run.plane.read("profile") is None:
        run.plane.check()  # the lead may be gone while the store lives
        work()
