"""Memory, address space or descriptors that run out: no slab, or a miss."""

import contextlib
import json
import os
import resource

import pytest
import torch

from pipetransformer.autocache import ActivationCache, Ragged

from .test_cache import SAMPLES, make_cache, merged, values
from .test_memory_of_others import outcome, written

IDS = torch.arange(SAMPLES)
RAGGED = Ragged(lambda inputs: inputs)
LARGE = 1 << 21  # bytes of a record of which a few need more memory than is reserved


@contextlib.contextmanager
def limited(kind, most):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def address_space():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def create_without(kind, most, ragged):
    with limited(kind, most() if callable(most) else most):
        with pytest.raises(OSError):
            make_cache(slot_bytes=LARGE, ragged=ragged)
    cache = make_cache(slot_bytes=4096, ragged=ragged)  # nothing of it is left behind
    assert cache.num_slots == SAMPLES


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        pytest.param(resource.RLIMIT_FSIZE, 1 << 20, id="memory"),
        pytest.param(resource.RLIMIT_AS, lambda: address_space() + LARGE, id="space"),
        pytest.param(resource.RLIMIT_NOFILE, 0, id="descriptors"),
    ],
)
def test_a_slab_that_cannot_be_had_is_an_error_to_create(kind, most, ragged):
    assert outcome(create_without, kind, most, ragged) == 0


def large_rows(ids):
    return values(ids, 1, LARGE // 4)[:, None]  # one position each


def put(cache, ids):
    return cache.store(
        ids,
        (large_rows(ids),),
        boundary=1,
        fingerprint=1,
        ragged=RAGGED,
        lengths=torch.ones(len(ids), dtype=torch.int64),
    )


def read(cache):
    found = merged(cache.fetch(IDS, chain=[0, 1], ragged=RAGGED), SAMPLES)
    for sample, (_, (got,)) in found.items():
        assert torch.equal(got, large_rows(IDS[sample : sample + 1])[0])
    return sorted(found)


def go_on_without_descriptors():
    cache = make_cache(slot_bytes=LARGE + 512, num_slots=12, ragged=True)
    other = ActivationCache.attach(cache.address, run_id="run")
    assert put(cache, IDS[:2]) == 2
    with limited(resource.RLIMIT_NOFILE, 0):
        # Whether there is memory cannot be looked up, so there is none.
        stored = put(cache, IDS[2:8])
        assert stored < 6
        assert cache.counters.full == 6 - stored
        assert read(cache) == list(range(2 + stored))
        # What others have reserved is there, and nobody needs to look up for it.
        assert read(other) == list(range(2 + stored))
        with pytest.raises(ValueError, match="expected a cache held by a process"):
            ActivationCache.attach(cache.address, run_id="run")
    assert put(cache, IDS[:8]) == 6 - stored
    assert read(cache) == read(other) == list(range(8))


def test_a_ragged_slab_serves_what_it_has_when_no_more_can_be_reserved():
    assert outcome(go_on_without_descriptors) == 0


def read_without_what_was_reserved():
    cache = make_cache(slot_bytes=LARGE + 512, num_slots=12, ragged=True)
    other = ActivationCache.attach(cache.address, run_id="run")
    assert put(cache, IDS[:8]) == 8
    os.close(json.loads(other.address)["fd"])  # nothing can be reserved by it
    assert len(read(other)) < 8
    assert other.counters.corrupt == 0
    assert read(cache) == list(range(8))


def test_records_whose_memory_cannot_be_had_are_plain_misses():
    assert outcome(read_without_what_was_reserved) == 0


def fetch_without_space(ragged):
    torch.set_num_threads(1)  # others would have memory of their own
    cache = make_cache(slot_bytes=LARGE + 512, verify="all", ragged=ragged)
    rows = large_rows(IDS)
    spec = RAGGED if ragged else None
    lengths = torch.ones(SAMPLES, dtype=torch.int64) if ragged else None
    given = dict(boundary=1, fingerprint=1, ragged=spec, lengths=lengths)
    assert cache.store(IDS, (rows,), **given) == SAMPLES
    with limited(resource.RLIMIT_AS, address_space() + SAMPLES * LARGE // 2):
        assert cache.fetch(IDS, chain=[0, 1], ragged=spec) == []
        counts = cache.counters
        assert (counts.hits, counts.misses) == (0, SAMPLES)
        assert (counts.corrupt, counts.stale, counts.changed) == (0, 0, 0)
        (few,) = cache.fetch(IDS[:4], chain=[0, 1], ragged=spec)
        assert torch.equal(few.tensors[0], rows[:4])
    (found,) = cache.fetch(IDS, chain=[0, 1], ragged=spec)
    assert torch.equal(found.tensors[0], rows)


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_a_batch_that_there_is_no_memory_for_is_missed_and_its_records_stay(ragged):
    assert outcome(fetch_without_space, ragged) == 0


# --- padding of records that others wrote ----------------------------------------


def fetch_padded(fields, fill):
    cache = written(**fields)
    ragged = Ragged(lambda inputs: inputs, fill=fill)
    found = merged(
        cache.fetch(IDS, chain=[0, 1], ragged=ragged, length=64),
        SAMPLES,
    )
    assert set(found) >= set(range(1, SAMPLES))
    counts = cache.counters
    assert counts.hits == len(found)
    assert counts.misses == SAMPLES - len(found) == counts.corrupt + counts.changed


def fetch_every_padded_type():
    for dtype in range(64):
        for fill in (0.0, -1e300, float("nan")):
            fetch_padded(dict(tensors=((dtype, 256 + 1, 0),), payload_bytes=0), fill)


def test_a_padded_record_of_any_type_is_a_tensor_or_a_miss():
    assert outcome(fetch_every_padded_type) == 0


@pytest.mark.parametrize("width", [2**20, 2**30, 2**31])
def test_an_empty_record_that_would_be_padded_beyond_all_memory_is_missed(width):
    fields = dict(tensors=((6, 256 + 2, 0, width),), payload_bytes=0)
    assert outcome(fetch_padded, fields, 0.0) == 0
