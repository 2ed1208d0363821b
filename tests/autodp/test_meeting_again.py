"""Ranks meet on a store that holds what earlier attempts have left.

torchrun keeps its store when it starts its workers anew, and does not count on every
node alike: the agent of a healthy worker that is started again counts nothing.
"""

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from pipetransformer.autodp import PeerFailure, connect
from tests.autodp.meetings import (
    DRAWN,
    LONG_S,
    Beating,
    attend,
    called,
    join_and_die,
    make_meeting,
)
from tests.autodp.world import FAST, joined, until
from tests.support.ranks import Ranks
from tests.support.store_host import StoreHost

PATIENCE_S = 2.0  # in which two heartbeats of the meetings here are missed
# Attempts of two nodes with a worker each: what their agents have counted.
COUNTS = [(0, 0), (0, 1), (1, 2), (1, 2)]


def _worker(number, environment):
    """Be one worker of one attempt; each attempt dies in another way."""
    attempt, rank = divmod(number, 2)
    os.environ.update(
        environment,
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
        TORCHELASTIC_RUN_ID="job",
        TORCHELASTIC_RESTART_COUNT=str(COUNTS[attempt][rank]),
    )
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if attempt > 0:  # torchrun starts workers when those before have ended
        before = [f"over/{attempt - 1}/{other}" for other in range(2)]
        store.wait(before, timedelta(seconds=LONG_S))
    try:
        if attempt == 1 and rank == 0:
            return "never came to the meeting"
        if attempt == 1:
            hurried = replace(FAST, store_timeout=timedelta(seconds=2))
            os.environ.pop("TORCHELASTIC_RUN_ID")  # its launcher would wait longer
            os.environ.pop("TORCHELASTIC_RESTART_COUNT")
            with pytest.raises(PeerFailure, match=r"ranks \[0\] did not join"):
                connect(hurried)
            return "waited in vain"
        if attempt == 2 and rank == 0:  # healthy, and slow: the other one is there
            time.sleep(3.0)
        with joined() as plane:
            told = plane.gather("told", b"%d" % rank, phase="t")
        with joined() as plane:
            return told + plane.gather("told", b"%d" % rank, phase="t")
    finally:
        store.set(f"over/{attempt}/{rank}", "")


@pytest.mark.distributed
def test_ranks_whose_launchers_have_counted_their_restarts_differently_meet():
    workers = 2 * len(COUNTS)
    with (
        StoreHost() as host,
        Ranks(_worker, workers, host.environment, timeout_s=115) as ranks,
    ):
        told = ranks.join()
    met = [b"0", b"1"] * 2
    in_vain = ["never came to the meeting", "waited in vain"]
    assert told == [met, met, *in_vain, met, met, met, met]


def later(ranks, store, world_size=2, **options):
    """Let ranks attend; return who waits for what comes of it."""
    results = {}
    threads = [
        threading.Thread(
            target=attend, args=(store, rank, world_size, results), kwargs=options
        )
        for rank in ranks
    ]
    for thread in threads:
        thread.start()

    def wait():
        for thread in threads:
            thread.join(LONG_S)
        return results

    return wait


def assert_met(*waits):
    """Return the name of the run in which the ranks have met."""
    found = {}
    for wait in waits:
        found |= wait()
    assert all(isinstance(result, tuple) for result in found.values()), found
    (name,) = {name for name, _ in found.values()}
    return name


def test_ranks_meet_where_others_have_met_whoever_comes_first():
    store = HashStore()
    names = {assert_met(later([0, 1], store))}
    for first, second in ([0], [1]), ([1], [0]):
        early = later(first, store)
        time.sleep(PATIENCE_S)
        names.add(assert_met(early, later(second, store)))
    assert len(names) == 3


@pytest.mark.parametrize("joined_before", [[0], [1], [0, 1], [0, 1, 2]])
def test_nobody_misses_ranks_of_a_meeting_that_has_died(joined_before):
    store = HashStore()
    for rank in joined_before:
        join_and_die(store, rank, DRAWN[0])
    early = later([1, 2], store, 3)
    time.sleep(PATIENCE_S)
    assert_met(early, later([0], store, 3))


def test_who_comes_early_after_a_restart_does_not_believe_who_was_gone_before():
    store = HashStore()
    early = later([0], store, 3)
    join_and_die(store, 1, called(store))
    (failure,) = early().values()
    assert isinstance(failure, PeerFailure) and failure.rank == 1
    early = later([1, 2], store, 3, watched=True)
    time.sleep(PATIENCE_S)
    assert_met(early, later([0], store, 3))


def test_rank_0_that_is_started_anew_in_the_middle_of_the_meeting_is_met():
    store = HashStore()
    with Beating(store, 0, DRAWN[0]):
        early = later([1], store, 3)
        until(lambda: store.check([f"m/{DRAWN[0]}/1"]))
    assert_met(early, later([0, 2], store, 3))


def test_another_rank_that_is_started_anew_in_the_middle_of_the_meeting_is_met():
    store = HashStore()
    early = later([0], store, 3)
    call = called(store)
    with Beating(store, 1, call, first=1_000_000):
        time.sleep(0.5)  # rank 0 sees it beat
    again = later([1], store, 3)
    time.sleep(PATIENCE_S)  # its beats are few
    assert_met(early, again, later([2], store, 3))


def test_a_rank_goes_on_from_a_meeting_that_has_ended_when_the_next_is_called():
    """Rank 0 may have failed in the run, and called again, before others look."""
    store = HashStore()
    slow, looked = make_meeting(store, 1, 2), []
    inner = slow._newest_call

    def newest_call():
        found = inner()
        if found and not looked:
            looked.append(found)
        elif found:  # this rank has joined: rank 0 ends the meeting, and calls again
            until(lambda: store.check([f"m/{looked[0]}/end"]))
            store.set("m/call", DRAWN[3])
            found = inner()
        return found

    slow._newest_call = newest_call
    early = later([0], store)
    name, _ = slow.attend("value 1", time.monotonic() + LONG_S)
    assert assert_met(early) == name
