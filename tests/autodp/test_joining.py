"""Joining a run: a store that stalls while ranks connect, and a caller that is gone."""

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from pipetransformer.autodp import PeerFailure, connect, launch
from pipetransformer.autodp.meeting import Meeting
from tests.autodp.world import FAST, joined
from tests.support.ranks import Ranks, run_ranks
from tests.support.store_host import StoreHost

HURRIED = replace(FAST, heartbeat_timeout=timedelta(seconds=1))
LONG_S = 60.0


def _connects(rank, store_pid, environment):
    """Join; the store stalls for three heartbeats when rank 0 has, and rank 1 not."""
    os.environ.update(environment)
    if rank == 1:
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
        store.wait(["pt/meet/2/call"], timedelta(seconds=LONG_S))
        os.kill(store_pid, signal.SIGSTOP)
        try:
            time.sleep(3 * HURRIED.heartbeat_timeout.total_seconds())
        finally:
            os.kill(store_pid, signal.SIGCONT)
    info, _ = connect(HURRIED)
    return info.run_id


@pytest.mark.distributed
def test_a_store_that_stalls_while_ranks_connect_ends_no_start():
    """As its server does over the names of its clients; half of `store_timeout`."""
    with (
        StoreHost() as host,
        Ranks(_connects, 2, host.pid, host.environment) as ranks,
    ):
        first, second = ranks.join()
    assert first == second


def _comes_late(rank, launched):
    if launched:
        os.environ["TORCHELASTIC_RUN_ID"] = "job"
    if rank == 1:
        time.sleep(4)
    records = []
    logger = logging.getLogger("pipetransformer.autodp.meeting")
    logger.addFilter(lambda record: records.append(record.getMessage()))
    try:
        with joined(replace(FAST, store_timeout=timedelta(seconds=1.5))) as plane:
            return plane.gather("told", f"rank {rank}".encode(), phase="t"), records
    except PeerFailure as failure:
        return str(failure), records


@pytest.mark.distributed
def test_a_rank_that_torchrun_watches_may_come_late():
    (first, told), (second, _) = run_ranks(_comes_late, 2, True)
    assert first == second == [b"rank 0", b"rank 1"]
    (line,) = told
    assert line.startswith("ranks [1] have not joined yet"), line
    text, told = run_ranks(_comes_late, 2, False)[0]
    assert "deadline 1.5 s" in text and "ranks [1] did not join" in text, text
    assert told == []


class Interrupted:
    """A rank whose user presses Ctrl-C where its thread comes to a call."""

    def __init__(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        self.store = HashStore()
        self.gone = threading.Event()
        self.opened = 0
        monkeypatch.setattr(launch, "_open_store", self.open_store)

    def open_store(self, place, deadline):
        self.opened += 1
        return place, self.store

    def press(self):
        os.kill(os.getpid(), signal.SIGINT)
        assert self.gone.wait(LONG_S)

    def join(self):
        """Join until Ctrl-C; return when the thread has ended."""
        before = {*threading.enumerate()}
        # A shell starts what runs in the background with this signal ignored.
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                connect(FAST)
        finally:
            signal.signal(signal.SIGINT, inherited)
        threads = {*threading.enumerate()} - before
        self.gone.set()
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive()


def test_who_is_gone_before_the_store_was_open_joins_no_meeting(monkeypatch):
    rank = Interrupted(monkeypatch)

    def slow(place, deadline):
        rank.press()
        return rank.open_store(place, deadline)

    monkeypatch.setattr(launch, "_open_store", slow)
    rank.join()
    assert rank.store.num_keys() == 0


def test_who_is_gone_while_it_waits_for_others_joins_no_further_meeting(monkeypatch):
    rank = Interrupted(monkeypatch)

    def newest_call(meeting, inner=Meeting._newest_call):
        rank.press()
        return inner(meeting)

    monkeypatch.setattr(Meeting, "_newest_call", newest_call)
    rank.join()
    assert rank.opened == 1
