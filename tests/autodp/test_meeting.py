"""Ranks find each other, and miss one that has joined and is gone."""

import hashlib
import itertools
import re
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from pipetransformer import _C
from pipetransformer.autodp import PeerFailure
from tests.autodp.adversary import KEYS
from tests.autodp.meetings import (
    DRAWN,
    LONG_S,
    Beating,
    attend,
    attended,
    called,
    join_and_die,
    make_meeting,
)
from tests.autodp.world import until


def test_all_ranks_agree_on_a_name_that_no_other_run_has_and_hear_all_values():
    names = set()
    for _ in range(3):
        results = attended(3, range(3), HashStore())
        name, values = results[0]
        assert results == {rank: (name, values) for rank in range(3)}
        assert values == ["value 0", "value 1", "value 2"]
        names.add(name)
    assert len(names) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def test_the_name_is_made_of_what_all_ranks_drew():
    store, results = HashStore(), {}
    rank_0 = threading.Thread(target=attend, args=(store, 0, 3, results, LONG_S))
    rank_0.start()
    call = called(store)
    for rank in (1, 2):
        join_and_die(store, rank, call)
    rank_0.join(LONG_S)
    drawn = " ".join([call, *DRAWN[1:3]])
    assert results[0][0] == hashlib.sha256(drawn.encode()).hexdigest()[:32]


class Sealed:
    """A run's store with a secret, as in `SealedStore`'s tests, and what is below."""

    def __init__(self):
        self.raw = HashStore()
        self.raw.set_timeout(timedelta(seconds=1))
        self.seal = _C.autodp.StoreSeal(b"one secret for two runs")
        self.store = self.seal.sealed(self.raw)

    def held(self):
        """Return what it holds below the seal."""
        return {name: self.raw.get(name) for name in self.raw.list_keys()}

    def put(self, name, data):
        self.raw.delete_key(name)
        self.raw.compare_set(name, "", data)  # takes bytes as they are


class Replaying:
    """How a rank sees a store on which somebody puts back old messages.

    Args:
        sealed: The store.
        recorded: The messages, by their names there.
    """

    def __init__(self, sealed, recorded):
        self._sealed, self._recorded = sealed, recorded
        self.set = sealed.store.set
        self.compare_set = sealed.store.compare_set
        self.get = sealed.store.get

    def check(self, keys):
        for name, data in self._recorded.items():
            self._sealed.put(name, data)
        return self._sealed.store.check(keys)


needs_list = pytest.mark.skipif(
    not hasattr(HashStore, "list_keys"), reason="a store that lists no keys"
)


def first_run(world_size):
    sealed = Sealed()
    results = attended(world_size, range(world_size), sealed.store)
    return results[0][0], sealed.held()


@needs_list
def test_a_run_that_is_told_what_another_one_with_its_secret_said_does_not_begin():
    name, recorded = first_run(2)
    sealed = Sealed()
    results = attended(2, range(2), Replaying(sealed, recorded), within_s=3.0)
    assert sorted(results) == [0, 1]
    for error in results.values():
        assert isinstance(error, TimeoutError), error
    assert "another rank 0 has called the ranks since" in str(results[0])
    assert "ranks have met here before" in str(results[1])
    assert sealed.seal.refusals() == (0, ""), "their seals fit"
    assert name not in str(results)


@needs_list
def test_what_a_run_has_written_is_refused_by_the_next_one_with_its_secret():
    keys = [key.format(r=1, g=0, e=2) for key in KEYS]
    wrote, recorded = {}, {}
    for run in ("first", "second"):
        sealed = Sealed()
        name = attended(2, range(2), sealed.store)[0][0]
        met = {*sealed.held()}
        store = PrefixStore(f"pt/{name}", sealed.store)
        for key in keys:
            before = {*sealed.held()}
            store.set(key, f"of the {run} run")
            (wrote[run, key],) = {*sealed.held()} - before
        if run == "first":
            recorded = {n: d for n, d in sealed.held().items() if n not in met}
    assert len(recorded) == len(keys)
    for hidden, data in recorded.items():
        assert hidden not in sealed.held(), "what is put back there nobody reads"
        sealed.put(hidden, data)
    assert all(store.get(key) == b"of the second run" for key in keys)
    for key in keys:
        sealed.put(wrote["second", key], recorded[wrote["first", key]])
        assert not store.check([key])
    assert sealed.seal.refusals()[0] == len(keys)


def told_to_rank_0(text):
    store = HashStore()

    def come():
        store.compare_set(f"m/{called(store)}/1", "", text)

    comes = threading.Thread(target=come)
    comes.start()
    try:
        return make_meeting(store, 0, 2).attend("value 0", time.monotonic() + LONG_S)
    finally:
        comes.join()


@pytest.mark.parametrize(
    "text", ["", "value 1", "0" * 32, "0" * 31 + " value", "0" * 31 + "A value"]
)
def test_who_says_no_name_is_refused(text):
    match = "meeting: expected 32 digits and an address, got"
    with pytest.raises(RuntimeError, match=match):
        told_to_rank_0(text)
    assert told_to_rank_0("0" * 32 + " value 1")[1] == ["value 0", "value 1"]


# Also where the late one is the rank before the dead one.
@pytest.mark.parametrize(("dead", "late"), [(1, [3]), (2, [1]), (3, [1, 2])])
def test_a_rank_that_has_joined_and_died_is_told_to_all_and_to_who_comes_later(
    dead, late
):
    store = HashStore()
    dies = threading.Thread(target=lambda: join_and_die(store, dead, called(store)))
    dies.start()
    there = [rank for rank in range(4) if rank != dead and rank not in late]
    early = attended(4, there, store)
    later = attended(4, late, store)  # with them everybody would have joined
    dies.join()
    assert sorted({**early, **later}) == sorted([*there, *late])
    for failure in (*early.values(), *later.values()):
        assert isinstance(failure, PeerFailure), failure
        assert (failure.rank, failure.phase) == (dead, "connect")
        assert failure.deadline_s == 1.0


def test_rank_0_is_missed_by_who_has_seen_it_beat_and_told_to_who_comes_later():
    store, results = HashStore(), {}
    threads = [
        threading.Thread(target=attend, args=(store, rank, 4, results, LONG_S))
        for rank in (1, 2)
    ]
    with Beating(store, 0, DRAWN[0]):
        for thread in threads:
            thread.start()
        places = [f"m/{DRAWN[0]}/{rank}" for rank in (1, 2)]
        until(lambda: store.check(places))
        first = int(store.get(f"m/{DRAWN[0]}/hb/{DRAWN[0]}"))
        until(lambda: int(store.get(f"m/{DRAWN[0]}/hb/{DRAWN[0]}")) > first + 20)
    for thread in threads:
        thread.join(LONG_S)
    results |= attended(4, [3], store)
    assert sorted(results) == [1, 2, 3]
    for failure in results.values():
        assert isinstance(failure, PeerFailure), failure
        assert (failure.rank, failure.phase) == (0, "connect")


def test_old_beats_that_are_put_back_are_no_signs_of_life():
    store = HashStore()
    over = threading.Event()

    def put_back():
        call = called(store)
        join_and_die(store, 1, call)
        for beat in itertools.cycle(range(5)):
            store.set(f"m/{call}/hb/{DRAWN[1]}", str(beat))
            if over.wait(0.03):
                break

    adversary = threading.Thread(target=put_back)
    adversary.start()
    results = attended(3, [0], store)
    over.set()
    adversary.join()
    assert isinstance(results[0], PeerFailure), results
    assert results[0].rank == 1


def test_a_rank_that_joins_between_two_that_watch_each_other_is_watched():
    store = HashStore()

    def join_late():
        call = called(store)
        until(lambda: store.check([f"m/{call}/3"]))
        drawn = store.get(f"m/{call}/3").decode().partition(" ")[0]
        for name in (call, drawn):
            until(lambda name=name: int(store.get(f"m/{call}/hb/{name}")) >= 3)
        join_and_die(store, 2, call)

    late = threading.Thread(target=join_late, daemon=True)
    late.start()
    results = attended(4, [0, 3], store)
    assert [results[rank].rank for rank in (0, 3)] == [2, 2]


def test_ranks_that_do_not_come_are_named():
    meeting = make_meeting(HashStore(), 0, 3)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not join"):
        meeting.attend("value", time.monotonic())
    meeting = make_meeting(HashStore(), 1, 3)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not join"):
        meeting.attend("value", time.monotonic())
