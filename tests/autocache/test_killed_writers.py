"""Writers that are killed anywhere in a record: the others go on, with whole records.

A killed writer leaves the slot it was writing in WRITING. Whoever reads there misses,
whoever writes there takes the slot over, and nobody waits.
"""

import json
import multiprocessing
import os
import random
import signal
import struct
import time

import pytest
import torch

from pipetransformer.autocache import ActivationCache, record_bytes

from .test_cache import make_cache, merged

FORK = multiprocessing.get_context("fork")
WAIT_S = 60
KILLS, WRITERS = 100, 2  # in each test, at least; so many at once
MOST_KILLS = 5 * KILLS  # until enough of them fell into the middle of a record
CAUGHT = KILLS // 10  # so many are enough
SAMPLES, WIDTH = 8, 1 << 15
IDS = torch.arange(SAMPLES)
TURNS = 8
LAST = TURNS + 1  # the boundary that survivors write
INDEX = 4096
SLOTS = INDEX + 64 * (SAMPLES * 8 // 64)
WRITING = 1


def row(sample, boundary):
    return torch.full((WIDTH,), 100.0 * sample + boundary)


def rows(boundary):
    return torch.stack([row(sample, boundary) for sample in range(SAMPLES)])


SLOT_BYTES = record_bytes([rows(0)])


def write_forever(address, seed, ready):
    """Store all samples in random order, over and over, each time as another one."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    cache = ActivationCache.attach(address, run_id="run")
    batches = [rows(boundary) for boundary in range(1, TURNS + 1)]
    os.write(ready, b"x")
    while True:
        boundary = draw.randint(1, TURNS)
        order = torch.tensor(draw.sample(range(SAMPLES), SAMPLES))
        batch = batches[boundary - 1][order]
        cache.store(order, (batch,), boundary=boundary, fingerprint=boundary)


def kill_writers(cache, draw):
    """Have writers killed at a random moment; return when nothing of them runs."""
    readable, ready = os.pipe()
    writers = [
        FORK.Process(
            target=write_forever,
            args=(cache.address, draw.getrandbits(32), ready),
            daemon=True,
        )
        for _ in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    os.close(ready)
    begun = b""
    while len(begun) < WRITERS:  # ends when no writer is left, too
        more = os.read(readable, WRITERS)
        assert more, "a writer ended by itself"
        begun += more
    os.close(readable)
    time.sleep(draw.uniform(0.0, 0.004))
    for writer in writers:
        assert writer.is_alive()
        os.kill(writer.pid, signal.SIGKILL)
    for writer in writers:
        writer.join(WAIT_S)
        assert writer.exitcode == -signal.SIGKILL


def half_written(cache):
    """How many slots are in WRITING."""
    fd = json.loads(cache.address)["fd"]
    count = 0
    for sample in range(SAMPLES):
        (entry,) = struct.unpack("<Q", os.pread(fd, 8, INDEX + 8 * sample))
        if entry and not entry >> 63:
            place = SLOTS + entry % 2**37 * 64
            (version,) = struct.unpack("<Q", os.pread(fd, 8, place))
            count += version & 3 == WRITING
    return count


def right_records(cache, last=0):
    """Samples that are found; all they hold is what some writer stored of them."""
    chain = [*range(LAST), last]
    found = merged(cache.fetch(IDS, chain=chain), SAMPLES)
    for sample, (boundary, (got,)) in found.items():
        assert torch.equal(got, row(sample, boundary))
    assert cache.counters.corrupt == 0
    return set(found)


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_writers_killed_a_hundred_times_leave_whole_records_and_their_slots(ragged):
    cache = make_cache(
        num_samples=SAMPLES,
        num_slots=SAMPLES + 1,  # they are rounded up
        slot_bytes=SLOT_BYTES,
        verify="all",
        ragged=ragged,
    )
    cache.store(IDS, (rows(1),), boundary=1, fingerprint=1)
    used = cache.used_bytes
    draw, caught = random.Random(3), 0
    for turn in range(1, 1 + MOST_KILLS // WRITERS):
        kill_writers(cache, draw)
        torn = half_written(cache)
        assert torn <= WRITERS
        assert len(right_records(cache, turn - 1)) == SAMPLES - torn
        caught += torn
        stored = cache.store(IDS, (rows(LAST),), boundary=LAST, fingerprint=turn)
        assert stored == SAMPLES, "the slots of the dead are taken over"
        assert right_records(cache, turn) == set(range(SAMPLES))
        assert cache.used_bytes == used, "and no others"
        if turn * WRITERS >= KILLS and caught >= CAUGHT:
            break
    assert caught >= CAUGHT, "many were killed in the middle of a record"


def test_writers_killed_at_their_first_records_lose_a_slot_each_at_most():
    draw, caught = random.Random(4), 0
    for turn in range(1, 1 + MOST_KILLS // WRITERS):
        # Memory is reserved as slots are taken, which takes most of the time.
        cache = make_cache(
            num_samples=SAMPLES,
            num_slots=SAMPLES + WRITERS,
            slot_bytes=SLOT_BYTES,
            verify="all",
            ragged=True,
        )
        kill_writers(cache, draw)
        torn = half_written(cache)
        assert len(right_records(cache)) <= SAMPLES - torn
        caught += torn
        stored = cache.store(IDS, (rows(LAST),), boundary=LAST, fingerprint=0)
        assert stored == SAMPLES
        assert right_records(cache) == set(range(SAMPLES))
        lost = cache.used_bytes - SAMPLES * cache.slot_bytes
        assert 0 <= lost <= WRITERS * cache.slot_bytes
        cache.close()
        if turn * WRITERS >= KILLS and caught >= CAUGHT // 2:
            break
    assert caught >= CAUGHT // 2, "some were killed in the middle of a record"
