"""Records that travel encoded to the device that uses them, and back.

The host stands in for the device: the cache is told that its host is another one.
tests/engine/test_device_codecs.py has a pretended accelerator, tests/gpu a real one.
"""

import contextlib
import random
import struct
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer import _C
from pipetransformer.autocache import CacheFolder, Ragged
from pipetransformer.autocache import cache as cache_module
from tests.support.codec import same_bits

from .test_cache import SAMPLES, make_cache
from .test_codec import (
    CHANNELS,
    COUNT,
    HEADER_BYTES,
    LOSSY,
    TOKENS,
    descriptor,
    drawn,
    encoded_size,
    parts,
    payload_place,
    write_crafted,
)

CPU = torch.device("cpu")
KEY = dict(boundary=1, fingerprint=1)


@contextlib.contextmanager
def host_elsewhere():
    """Have a cache take the CPU for a device."""
    with mock.patch.object(cache_module, "HOST", torch.device("meta")):
        yield


def fetch_there(cache, ids, **options):
    with host_elsewhere():
        return cache.fetch(ids, chain=[0, 1], device=CPU, **options)


def store_there(cache, ids, tensors, **options):
    with host_elsewhere():
        return cache.store(ids, tensors, **KEY, **options)


def assert_same_records(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.boundary, mine.lossy) == (theirs.boundary, theirs.lossy)
        assert torch.equal(mine.rows, theirs.rows)
        assert (mine.lengths is None) == (theirs.lengths is None)
        assert mine.lengths is None or torch.equal(mine.lengths, theirs.lengths)
        for got, expected in zip(mine.tensors, theirs.tensors, strict=True):
            assert same_bits(got, expected)


@pytest.mark.parametrize("codec", ["native", *LOSSY])
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_decoded_there_is_what_the_host_decodes(tmp_path, codec, on_disk):
    slots = 10 if on_disk else SAMPLES
    cache = make_cache(ragged=True, verify="all", num_slots=slots, slot_bytes=2048)
    if on_disk:
        cache.add_disk(tmp_path, patience_s=60.0)
    hidden, mask, numbers = parts(SAMPLES)
    hidden[::7, 2, 3] = -torch.inf  # native rows among the others
    ids = torch.randperm(SAMPLES)
    cache.store(ids, (hidden, mask, numbers), **KEY, codec=codec)
    there = fetch_there(cache, ids, codec=codec)
    assert_same_records(there, cache.fetch(ids, chain=[0, 1], codec=codec))
    assert [len(each.rows) for each in there] == [SAMPLES]
    assert (cache.counters.disk_hits > 0) == on_disk
    assert there[0].lossy == (codec != "native")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_of_any_length_travel_both_ways(data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    codec, dim = data.draw(st.sampled_from(LOSSY)), data.draw(st.integers(1, 2))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    ragged = Ragged(lambda inputs: None, dim=(dim, 1), fill=(0.5, 0))
    hidden = drawn(len(lengths), max(lengths) + 1, 20).to(dtype)
    if data.draw(st.booleans()):
        hidden[0] = torch.nan
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool)
    tensors = (hidden.movedim(1, dim), mask)
    ids, made = torch.arange(len(lengths)), dict(codec=codec, ragged=ragged)
    found, length = [], data.draw(st.sampled_from([None, max(lengths), 12]))
    for store in (store_there, lambda cache, *a, **k: cache.store(*a, **KEY, **k)):
        cache = make_cache(ragged=True)
        sizes = torch.tensor(lengths)
        assert store(cache, ids, tensors, lengths=sizes, **made) == len(ids)
        found.append(cache.fetch(ids, chain=[0, 1], length=length, **made))
        assert_same_records(fetch_there(cache, ids, length=length, **made), found[-1])
    assert_same_records(*found)


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_encoded_there_has_the_bytes_of_the_host(tmp_path, codec):
    hidden, mask, numbers = parts(SAMPLES)
    hidden[5, 3, 4] = hidden[9, 0, 0] = torch.inf
    hidden[7, 3, 4] = 300.0
    halves = drawn(SAMPLES, TOKENS, CHANNELS, seed=3).bfloat16()
    files = []
    for store in (store_there, lambda cache, *a, **k: cache.store(*a, **KEY, **k)):
        cache = make_cache(ragged=True)
        tensors = (hidden, mask, numbers, halves)
        assert store(cache, torch.arange(SAMPLES), tensors, codec=codec) == SAMPLES
        keeper = CacheFolder(tmp_path / str(len(files)))
        keeper.make()
        keeper.load(make_cache(), "train", 1)
        keeper.save(cache, "train", 1)
        files.append(keeper.path_of("train", 1, SAMPLES).read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("codec", LOSSY)
def test_only_encoded_bytes_travel(codec):
    cache, ids, tensors = make_cache(ragged=True), torch.arange(8), parts(8)
    cache.store(ids, tensors, **KEY, codec=codec)
    ((_, _, _, (hidden, mask, numbers), lossy),) = cache._store.fetch(  # noqa: SLF001
        ids, [0, 1], None, [], -1, codec, True, True
    )
    assert lossy and isinstance(hidden, _C.autocache.EncodedTensor)
    assert hidden.bytes.shape == (8 * (-(-encoded_size(codec) // 8) * 8),)
    assert (hidden.sizes, hidden.dtype) == ([TOKENS, CHANNELS], torch.float32)
    assert torch.equal(mask, tensors[1]) and torch.equal(numbers, tensors[2])


def test_records_that_are_native_come_as_tensors():
    cache, ids, tensors = make_cache(), torch.arange(8), parts(8)
    cache.store(ids, tensors, **KEY)
    assert_same_records(
        fetch_there(cache, ids, codec="int8"), cache.fetch(ids, chain=[0, 1])
    )


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (4 * CHANNELS, struct.pack("<If", COUNT, 7.25)),
        (4 * CHANNELS, struct.pack("<If", 2**32 - 2, 7.25)),
        (0, struct.pack("<f", float("nan"))),
        (4 * (CHANNELS - 1), struct.pack("<f", float("-inf"))),
    ],
    ids=["behind the row", "largest", "no scale", "infinite scale"],
)
@pytest.mark.parametrize("fetch", ["here", "there"])
def test_bytes_that_are_no_encoded_row_are_a_corrupt_record(fetch, offset, content):
    rows = drawn(5, TOKENS, CHANNELS)
    cache, ids = make_cache(ragged=True, verify="all"), torch.arange(5)
    cache.store(ids, (rows,), **KEY, codec="int8")
    expected = cache.fetch(ids, chain=[0, 1], codec="int8")[0].tensors
    write_crafted(cache, offset, content)
    options = dict(codec="int8")
    (found,) = (
        fetch_there(cache, ids, **options)
        if fetch == "there"
        else cache.fetch(ids, chain=[0, 1], **options)
    )
    assert found.rows.tolist() == [1, 2, 3, 4]
    assert torch.equal(found.tensors[0], expected[0][1:])
    assert (cache.counters.corrupt, cache.counters.hits) == (1, 9)
    # It does not stay in the way of the record that is computed instead.
    assert cache.store(ids[:1], (rows[:1],), **KEY, codec="int8") == 1
    (found,) = fetch_there(cache, ids, **options)
    assert torch.equal(found.tensors[0], expected[0])


@pytest.mark.parametrize("codec", LOSSY)
def test_no_flipped_bit_of_an_encoded_record_travels(codec):
    draw, row = random.Random(1), drawn(1, TOKENS, CHANNELS)
    cache, ids = make_cache(ragged=True, verify="all"), torch.arange(1)
    for turn in range(100):
        cache.store(ids, (row,), **KEY, codec=codec)
        place, memory = payload_place(cache)
        at = place + 8 + draw.randrange(HEADER_BYTES + encoded_size(codec))
        with open(f"/proc/self/fd/{descriptor(cache)}", "r+b") as file:
            file.seek(at)
            file.write(bytes([memory[at] ^ 1 << draw.randrange(8)]))
        assert fetch_there(cache, ids, codec=codec) == [], (turn, at - place)


def test_a_fill_that_the_type_does_not_hold_is_a_miss():
    halves = drawn(3, 9, 20).half()
    cache, ids = make_cache(ragged=True), torch.arange(3)
    lengths, kept = torch.tensor([9, 8, 7]), Ragged(lambda inputs: None)
    wide = Ragged(lambda inputs: None, fill=1e6)
    for fetch in (fetch_there, lambda c, i, **k: c.fetch(i, chain=[0, 1], **k)):
        cache.store(ids, (halves,), **KEY, ragged=kept, lengths=lengths, codec="int8")
        assert fetch(cache, ids, ragged=wide, codec="int8") == []
    assert cache.counters.corrupt == 6


def test_tensors_that_are_encoded_are_stored_with_no_codec_alone():
    rows = drawn(2, TOKENS, CHANNELS)
    encoded, offsets, _ = torch.ops.pipetransformer.encode_rows(rows, None, 3)
    codecs = torch.full((2,), 3, dtype=torch.uint8)

    def store(codec, begins=offsets):
        tensor = _C.autocache.EncodedTensor(
            encoded, begins, codecs, list(rows.shape[1:]), rows.dtype
        )
        cache = make_cache()
        arguments = (1, 1, None, [], None, codec, True)
        return cache._store.store(  # noqa: SLF001
            torch.arange(2), [tensor], *arguments
        )

    assert store("native") == 2
    with pytest.raises(ValueError, match="codec: expected native for what is encoded"):
        store("int8")
    with pytest.raises(ValueError, match="offsets: expected multiples of 8"):
        store("native", offsets + len(encoded))
