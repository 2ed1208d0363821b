"""How much the slots of a host slow each other, measured with all of them busy.

Slots share cores, memory and caches. The lead times its layers alone and while every
other rank of its node runs them, too, in turns: a machine that others share is by a
fifth faster or slower from one half second to the next, which is more than plans differ
by. Ranks of other nodes are left alone: theirs are taken to be like the lead's.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable
from datetime import timedelta

from pipetransformer.run.context import Run

_LOG = logging.getLogger(__name__)

_ALL = 0.98  # of the slots' speed, from which on they share nothing
_LEAST_WAIT = timedelta(seconds=10)  # for the others' first run

# A scheduler's slices of time are some ms: a mean of three short runs is one of few.
_TURN = 0.1  # s
_MOST_RUNS = 500  # of a turn
_TURNS = 4  # alone, and as many together
_ENOUGH = 0.4  # s together: long runs need no more turns

Work = Callable[[], float]
"""Runs the layers once; returns the seconds."""

MakeWork = Callable[[int], Work]
"""Makes the work of a micro-batch of so many rows."""


def _key(run: Run, *parts: object) -> str:
    """Return a key of this attempt: when it is made again, fewer ranks are there."""
    return "/".join(map(str, ("busy", len(run.plane.members), *parts)))


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

    The fastest turns are compared, since what disturbs one only adds to it.

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
    run.plane.publish(_key(run, "ask"), str(rows).encode())
    once = work()  # it may pay for memory that is new to it
    # The first run may take twice as long, and all of them share the cores.
    wait = max(_LEAST_WAIT, 4 * (len(others) + 1) * timedelta(seconds=once))
    alone: list[float] = []
    together: list[float] = []
    spent = 0.0
    while len(together) < _TURNS and spent < _ENOUGH:
        turn = len(together)
        if not _all_said(run, others, turn, "rests", wait):
            break
        if alone_s is None:
            alone.append(_turn(work)[0])
        run.plane.publish(_key(run, turn, "begin"), b"")
        if not _all_said(run, others, turn, "works", wait):
            break
        mean, taken = _turn(work)
        together.append(mean)
        spent += taken
        run.plane.publish(_key(run, turn, "end"), b"")
    if not together:
        _LOG.warning("slots are not measured together: ranks %s did not come", others)
        return usable_permille
    slots = 1000 * (len(others) + 1)
    quiet = alone_s or min(alone)
    found = max(1000, round(slots * min(1.0, quiet / min(together))))
    if usable_permille:
        return min(found, usable_permille)
    return found if found < _ALL * slots else 0


def _all_said(
    run: Run, others: list[int], turn: int, what: str, wait: timedelta
) -> bool:
    keys = [_key(run, turn, what, rank) for rank in others]
    return run.plane.wait_any([keys], timeout=wait) is not None


def _turn(work: Work) -> tuple[float, float]:
    """Return the mean of runs that take long enough to share cores, and their sum."""
    taken = [work()]
    while sum(taken) + taken[-1] / 2 < _TURN and len(taken) < _MOST_RUNS:
        taken.append(work())
    return statistics.fmean(taken), sum(taken)


def keep_busy(run: Run, make_work: MakeWork) -> None:
    """Work in turns while the lead measures; until the profile is there, elsewhere.

    Args:
        run: The run.
        make_work: Makes this rank's work, once it is asked for.

    Raises:
        PeerFailure: a rank was lost meanwhile.
    """
    plane, me = run.plane, run.info.rank
    lead_node = min(plane.members) // run.info.local_world_size
    ask = _key(run, "ask")
    if plane.wait_any([["profile"], [ask]]) == 0 or run.info.node != lead_node:
        return
    work = make_work(int(plane.read(ask) or 1))
    work()  # it may pay for memory that is new to it
    for turn in itertools.count():
        plane.publish(_key(run, turn, "rests", me), b"")
        if plane.wait_any([["profile"], [_key(run, turn, "begin")]]) == 0:
            return
        work()
        plane.publish(_key(run, turn, "works", me), b"")
        while plane.read(_key(run, turn, "end")) is None:
            if plane.read("profile") is not None:
                return  # the lead did not wait for all
            plane.check()  # it may be gone while the store lives
            work()
