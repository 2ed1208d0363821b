"""Ranks find each other, and miss one that has joined and is gone."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from pipetransformer.autodp import PeerFailure
from pipetransformer.autodp.cards import Cards, Job
from pipetransformer.autodp.meeting import Meeting
from tests.autodp.world import FAST

CONFIG = replace(
    FAST,
    heartbeat_interval=timedelta(seconds=0.05),
    heartbeat_timeout=timedelta(seconds=1),
)
LONG_S = 60.0


def make_meeting(store, rank, world_size):
    job = Job(world_size, "", "", sealed=False)
    cards = Cards(store, rank, job, 1, ours=False)
    return Meeting(store, "meet/1", rank, world_size, CONFIG, threading.Event(), cards)


def attend(store, rank, world_size, results):
    meeting = make_meeting(store, rank, world_size)
    deadline = time.monotonic() + LONG_S
    try:
        results[rank] = meeting.attend(f"{rank:032x}", f"value {rank}", deadline)
    except (PeerFailure, TimeoutError) as error:
        results[rank] = error


def attended(world_size, ranks, store):
    """Return what each of `ranks` comes to; they attend side by side."""
    results = {}
    threads = [
        threading.Thread(target=attend, args=(store, rank, world_size, results))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return results


def join_and_die(store, rank):
    """Leave what a rank leaves that dies right after it has joined."""
    store.set(f"meet/1/hb/{rank}", "0")
    store.set(f"meet/1/{rank}", f"value {rank}")


def test_all_ranks_hear_the_name_of_rank_0_and_all_values():
    results = attended(3, range(3), HashStore())
    expected = f"{0:032x}", ["value 0", "value 1", "value 2"]
    assert results == {rank: expected for rank in range(3)}


# Also where the late one is the rank before the dead one, or all between it and others.
@pytest.mark.parametrize(
    ("dead", "late"), [(1, [3]), (2, [1]), (1, [0]), (0, [3]), (3, [1, 2]), (1, [0, 3])]
)
def test_a_rank_that_has_joined_and_died_is_told_to_all_and_to_who_comes_later(
    dead, late
):
    store = HashStore()
    join_and_die(store, dead)
    if dead == 0:
        store.set("meet/1/id", f"{0:032x}")
    there = [rank for rank in range(4) if rank != dead and rank not in late]
    early = attended(4, there, store)
    later = attended(4, late, store)  # with them everybody would have joined
    assert sorted({**early, **later}) == sorted([*there, *late])
    for failure in (*early.values(), *later.values()):
        assert isinstance(failure, PeerFailure), failure
        assert (failure.rank, failure.phase) == (dead, "connect")
        assert failure.deadline_s == 1.0


def test_a_rank_that_joins_between_two_that_watch_each_other_is_watched():
    store = HashStore()

    def join_late():
        for rank in (0, 3):
            while int(store.get(f"meet/1/hb/{rank}")) < 3:
                time.sleep(0.01)
        join_and_die(store, 2)

    late = threading.Thread(target=join_late, daemon=True)
    late.start()
    results = attended(4, [0, 3], store)
    assert [results[rank].rank for rank in (0, 3)] == [2, 2]


def test_ranks_that_do_not_come_are_named():
    meeting = make_meeting(HashStore(), 0, 3)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not join"):
        meeting.attend("run", "value", time.monotonic())
