"""Several processes on one slab: attach, fork, kill."""

import json
import multiprocessing
import os
import pathlib
import signal
import time

import pytest
import torch

from pipetransformer.autocache import ActivationCache
from tests.support.ranks import Ranks, run_ranks

from .test_cache import SAMPLES, flip_bit, make_cache, merged, values


def fetch_and_store(rank, address):
    """What another process sees; it then adds the records of the upper half."""
    cache = ActivationCache.attach(address, run_id="run", verify="all")
    ids = torch.arange(SAMPLES)
    (group,) = cache.fetch(ids, chain=[0, 1])
    assert torch.equal(group.tensors[0], values(ids[group.rows], 1))
    upper = ids[SAMPLES // 2 :]
    cache.store(upper, (values(upper, 1),), boundary=1, fingerprint=1)
    sizes = (cache.num_samples, cache.num_slots, cache.slot_bytes)
    return group.rows.tolist(), sizes


@pytest.mark.distributed
def test_attached_process_reads_and_adds_records():
    cache, ids = make_cache(verify="all"), torch.arange(SAMPLES)
    lower = ids[: SAMPLES // 2]
    cache.store(lower, (values(lower, 1),), boundary=1, fingerprint=1)
    ((rows, sizes),) = run_ranks(fetch_and_store, 1, cache.address)
    assert rows == lower.tolist()
    assert sizes == (cache.num_samples, cache.num_slots, cache.slot_bytes)
    (group,) = cache.fetch(ids, chain=[0, 1])
    assert torch.equal(group.tensors[0], values(ids, 1))
    # Counters are those of this process.
    assert cache.counters.stored == SAMPLES // 2


def test_attached_cache_outlives_the_first_and_can_be_attached_to():
    first, ids = make_cache(), torch.arange(SAMPLES)
    first.store(ids, (values(ids, 1),), boundary=1, fingerprint=1)
    second = ActivationCache.attach(first.address, run_id="run")
    first.close()
    third = ActivationCache.attach(second.address, run_id="run")
    assert len(merged(third.fetch(ids, chain=[0, 1]), SAMPLES)) == SAMPLES


def write_forever(rank, address, width, ready):
    cache = ActivationCache.attach(address, run_id="run")
    ids = torch.arange(SAMPLES)
    for boundary in range(1, 1_000_000):
        x = values(ids, boundary % 50, width)
        cache.store(ids, (x,), boundary=boundary % 50, fingerprint=boundary % 50)
        open(ready, "w").close()


@pytest.mark.distributed
def test_kill_of_a_writer_leaves_whole_records_and_usable_slots(tmp_path):
    width = 1 << 16
    cache = make_cache(slot_bytes=width * 4 + 512, verify="all")
    ids, chain = torch.arange(SAMPLES), list(range(50))
    for attempt in range(2):
        ready = tmp_path / str(attempt)
        # Not forked from a server, which would reap it at once.
        ranks = Ranks(write_forever, 1, cache.address, width, str(ready), fresh=True)
        deadline = time.monotonic() + 100
        while not ready.exists():
            assert ranks.processes[0].is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        # Killed, not yet reaped: the slot it was writing is taken over all the same.
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        stat = pathlib.Path(f"/proc/{ranks.processes[0].pid}/stat")
        while stat.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        found = merged(cache.fetch(ids, chain=chain), SAMPLES)
        assert len(found) >= SAMPLES - 1
        for row, (boundary, (got,)) in found.items():
            assert torch.equal(got, values(ids[row : row + 1], boundary, width)[0])
        assert cache.counters.corrupt == 0
        x = values(ids, 60, width)
        stored = cache.store(ids, (x,), boundary=60, fingerprint=60 + attempt)
        assert stored == SAMPLES
        ranks.close()


def use_and_close(cache, ids):
    assert len(merged(cache.fetch(ids, chain=[0, 1]), SAMPLES)) == SAMPLES
    cache.store(ids[:1], (values(ids[:1], 2),), boundary=2, fingerprint=2)
    cache.close()


def test_forked_child_does_not_harm_the_parent():
    cache, ids = make_cache(verify="all"), torch.arange(SAMPLES)
    cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1)
    child = multiprocessing.get_context("fork").Process(
        target=use_and_close, args=(cache, ids)
    )
    child.start()
    child.join(100)
    assert child.exitcode == 0
    found = merged(cache.fetch(ids, chain=[0, 1, 2]), SAMPLES)
    assert [found[row][0] for row in range(SAMPLES)] == [2] + [1] * (SAMPLES - 1)
    assert cache.store(ids, (values(ids, 3),), boundary=3, fingerprint=3) == SAMPLES


def test_corruption_is_seen_by_every_process_that_reads():
    cache, ids = make_cache(verify="all"), torch.arange(3)
    other = ActivationCache.attach(cache.address, run_id="run", verify="all")
    x = torch.randn(3, 8)
    cache.store(ids, (x,), boundary=1, fingerprint=1)
    flip_bit(cache, x[1].numpy().tobytes())
    assert sorted(merged(other.fetch(ids, chain=[0, 1]), 3)) == [0, 2]
    assert sorted(merged(cache.fetch(ids, chain=[0, 1]), 3)) == [0, 2]
    assert (other.counters.corrupt, cache.counters.corrupt) == (1, 0)


def test_address_names_a_descriptor_of_this_process():
    cache = make_cache()
    address = json.loads(cache.address)
    assert address["pid"] == os.getpid()
    status = os.stat(f"/proc/self/fd/{address['fd']}")
    assert status.st_mode & 0o777 == 0o600


def test_an_audit_that_fails_ends_the_use_of_the_cache_in_every_process(caplog):
    cache = make_cache()
    other = ActivationCache.attach(cache.address, run_id="run")
    other.begin_pass()
    assert other.given_up is None
    cache.fail_audit("for the test")
    late = ActivationCache.attach(cache.address, run_id="run")
    caplog.clear()
    for each in (other, late):
        each.begin_pass()
        assert "found wrong by another process" in each.given_up
    assert caplog.text.count("used no more") == 2
    cache.begin_pass()
    assert cache.given_up == "for the test"


def test_records_of_an_earlier_run_that_are_wrong_end_no_process_s_use():
    cache, ids = make_cache(), torch.arange(SAMPLES)
    cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1)
    other = ActivationCache.attach(cache.address, run_id="run")
    for each in (cache, other):
        each.expect_earlier_records()
    cache.fail_audit("for the test")
    for each in (cache, other):
        each.begin_pass()
        assert each.given_up is None
    assert other.fetch(ids, chain=[0, 1]) == []
