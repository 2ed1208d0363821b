"""Ranks of other jobs, and what others write into a run's store without a secret."""

import json
import logging
import os
import re
import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from pipetransformer.autodp import ControlPlane, PeerFailure, connect
from pipetransformer.autodp.cards import Card, Cards, Job
from tests.autodp.world import FAST, SURVIVING, joined
from tests.support.ranks import run_ranks
from tests.support.store_host import StoreHost

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
ESCAPES = b"\x1b]0;owned\x07\x1b[2J\xff\xfe"
LONGEST = 5_000  # letters of an error


def _joins(rank):
    """Rank 2 is rank 1 of another job, of 3 ranks, and comes first."""
    if rank == 2:
        os.environ.update(RANK="1", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
        with pytest.raises(PeerFailure) as caught:
            connect(replace(FAST, store_timeout=timedelta(seconds=60)))
        return str(caught.value), caught.value.deadline_s
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    if rank == 1:
        time.sleep(2.0)  # the stranger is there before
    with joined() as plane:
        return plane.gather("rank", str(rank).encode(), phase="telling")


@pytest.mark.distributed
def test_a_rank_of_another_job_is_told_so_and_the_real_one_joins():
    first, second, (text, deadline_s) = run_ranks(_joins, 3)
    assert first == second == [b"0", b"1"]
    assert deadline_s is None, "not because its own ranks were missed for 60 s"
    assert "phase 'connect'" in text and "the store is another job's" in text
    assert "expected rank 0 of 3 ranks" in text and "a job of 2 ranks" in text
    assert f"on '{os.uname().nodename}'" in text


def _comes_where_others_met(rank, environment):
    """Ranks 0 and 1 meet; 2 and 3 are the two ranks of an equal job, one by one."""
    os.environ.update(environment, RANK=str(rank % 2), LOCAL_RANK=str(rank % 2))
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    if rank < 2:
        return connect(FAST)[0].run_id
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    store.wait([f"ended/{before}" for before in range(rank)], timedelta(seconds=60))
    with pytest.raises(PeerFailure) as caught:
        connect(replace(FAST, store_timeout=timedelta(seconds=3)))
    return str(caught.value)


def _comes_and_tells(rank, environment):
    try:
        return _comes_where_others_met(rank, environment)
    finally:
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
        store.set(f"ended/{rank}", "")


@pytest.mark.distributed
def test_ranks_of_another_equal_job_are_told_who_was_there_before():
    with StoreHost() as host:
        first, second, *others = run_ranks(_comes_and_tells, 4, host.environment)
    assert first == second
    for text, absent in zip(others, (1, 0), strict=True):
        assert f"ranks [{absent}] did not join; ranks have met here before" in text
        assert "another run is, or was, on this store" in text and "run_name" in text


HERE = Job(2, "", "", sealed=False)
GARBAGE = {
    "nothing": b"",
    "bytes": bytes(range(256)),
    "much": b"7" * 10_000_000,
    "deep": b"[" * 4000,
    "no object": b"[1, 2]",
    "text for a number": b'{"job": {"world_size": "2"}}',
    "true for a number": Card(HERE, "", True).encode().encode(),
    "a huge number": Card(HERE, "", 10**30).encode().encode(),
    "nested names": json.dumps({"job": {"world_size": 3, "launch": {}}}).encode(),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_card_that_no_rank_wrote_says_nothing(garbage):
    store = HashStore()
    cards = Cards(store, 1, HERE, ours=True)
    store.compare_set("pt/card/0", "", GARBAGE[garbage])
    assert cards.refusal() is None
    assert cards.hint([0]) == ""


def test_ranks_know_whether_they_are_on_the_host_of_rank_0():
    store = HashStore()
    cards = Cards(store, 1, HERE, ours=True)
    assert cards.apart() is None  # no card of it
    store.set("pt/card/0", Card(HERE, "elsewhere", 7).encode())
    assert cards.apart() == "elsewhere"
    store.set("pt/card/0", Card(HERE, socket.gethostname(), 7).encode())
    assert cards.apart() is None


def connect_from_hosts(rank, sizes):
    """Connect from a host of one's own; return what is warned of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{rank}")
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        for name, value in sizes.items():
            patch.setenv(name, value if name != "LOCAL_RANK" else str(rank))
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("pipetransformer").addHandler(handler)
        with joined():
            pass
    return [text for text in told if "of one node" in text]


@pytest.mark.distributed
def test_ranks_of_several_hosts_that_look_like_one_node_warn():
    first, second = run_ranks(connect_from_hosts, 2, {})
    assert first == []
    (text,) = second
    assert text.startswith("rank 1 is not on 'host0' as rank 0 is")
    told = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": ""}
    assert run_ranks(connect_from_hosts, 2, told) == [[], []]


class Removing(HashStore):
    """Its keys are gone between two looks at them."""

    def check(self, keys):
        held = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return held


def test_a_card_that_is_removed_meanwhile_is_waited_for_by_nobody():
    store = Removing()
    store.set_timeout(timedelta(milliseconds=50))  # where it is waited for: an error
    cards = Cards(store, 1, HERE, ours=True)
    store.set("pt/card/0", Card(HERE, "", 7).encode())
    assert cards.refusal() is None


def test_a_card_with_escapes_is_shown_without():
    store = HashStore()
    cards = Cards(store, 1, HERE, ours=True)
    bad = "\x1b[2J\u202e" + "x" * 1000
    store.set("pt/card/0", Card(Job(3, bad, bad, sealed=False), bad, 7).encode())
    for text in (cards.refusal(), cards.hint([0])):
        assert "process 7" in text and not CONTROLS.search(text)
        assert "\u202e" not in text and len(text) < 1200


# What of the protocol meets foreign bytes, and where it is read.
FORGED = {
    "account": ("gen/0/abort", ESCAPES * 10),
    "account of 5 MB": ("gen/0/abort", ESCAPES * 500_000),
    "account with a long phase": (
        "gen/0/abort",
        b"failure 1\n1\n0\n-1.0\n" + b"p" * 9000 + b"\n" + ESCAPES,
    ),
    "beat": ("hb/{}", ESCAPES),
    "beat above 64 bits": ("hb/{}", b"9" * 40),
    "list of the roll": ("roll/1/list", b"0 1 7"),
    "list of the roll, no numbers": ("roll/1/list", ESCAPES),
}


def _meets_forgery(rank, key, value, environment):
    os.environ.update(environment)  # the store outlives the ranks
    info, store = connect(SURVIVING)
    plane = ControlPlane(store, info, SURVIVING)
    try:
        if rank == 0:
            for each in range(2) if "{}" in key else (0,):
                store.set(key.format(each), value)
        end = time.monotonic() + 20
        beats = key.startswith("hb/")
        if beats:  # the next beat of its writer takes its place
            for _ in range(30):
                store.set(key.format(1 - rank), value)
                time.sleep(0.02)
            end = time.monotonic() + 2
        while plane.failure is None and time.monotonic() < end:
            if key.startswith("roll/"):
                plane.fail("test", "so that there is a roll", rank=-1)
            time.sleep(0.01)
        failure = plane.failure
        if beats:
            return failure, None
        try:
            plane.survive(b"here")
        except (PeerFailure, RuntimeError) as error:
            return str(failure), str(error)
        return str(failure), None
    finally:
        plane.close()


@pytest.mark.distributed
@pytest.mark.parametrize("case", FORGED)
def test_what_others_write_gives_short_plain_errors_or_none(case):
    key, value = FORGED[case]
    with StoreHost() as host:
        outcomes = run_ranks(_meets_forgery, 2, key, value, host.environment)
    for failure, error in outcomes:
        if case.startswith("beat"):
            assert failure is None
            continue
        for text in filter(None, (failure, error)):
            assert not CONTROLS.search(text) and len(text) < LONGEST
        if case.startswith("account"):
            assert "peer failure" in failure
        else:
            assert "roll: expected ascending members of the generation" in error


def _raises(rank, text):
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    try:
        if rank == 0:
            plane.fail("user code", text)
        with pytest.raises(PeerFailure) as caught:
            plane.wait("never", phase="waiting")
        return caught.value.reason
    finally:
        plane.close()


@pytest.mark.distributed
def test_the_words_of_a_users_error_reach_the_other_ranks_without_escapes():
    text = "FileNotFoundError: caf\udce9\x1b[2J\n" + "x" * 9000
    first, second = run_ranks(_raises, 2, text)
    for reason in (first, second):
        assert reason.startswith("FileNotFoundError: caf\\udce9")
    assert not CONTROLS.search(second) and len(second) < LONGEST
