"""Codecs: what they make of a row, how large it is, and what they leave as it is."""

import itertools
import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipetransformer import _C
from pipetransformer.autocache import CacheFolder, Ragged, record_bytes, round_trip

from .test_cache import SAMPLES, make_cache, merged
from .test_memory_of_others import INDEX, SLOTS, descriptor, outcome

LOSSY = ["bf16", "fp16", "int8"]
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FITS = {
    "bf16": lambda x: x.abs() < 1e30,
    "fp16": lambda x: x.abs() <= 65504,
}
PLACES_PER = 256  # values for each outlier
TOKENS, CHANNELS = 12, 16


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- bf16 and fp16 -------------------------------------------------------------

ANY_FLOAT = st.integers(0, 2**32 - 1)
USUAL = st.floats(-2.0, 2.0, width=32).map(
    lambda value: struct.unpack("<I", struct.pack("<f", value))[0]
)
EDGES = st.sampled_from(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF),  # zeros, subnormals
        *(0x477FE000, 0x477FE001, 0x477FEFFF, 0x477FF000),  # the largest half
        *(0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x32FFFFFF),  # small halves
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF),  # infinities, NaN, largest
        *(0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000),  # ties
        *(0x7149F2CA, 0x7149F2C9, 0xF149F2CB),  # 1e30
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(USUAL | EDGES | ANY_FLOAT, min_size=1, max_size=70),
    codec=st.sampled_from(sorted(HALVES)),
)
def test_values_are_rounded_as_torch_does_or_the_row_is_left_alone(words, codec):
    row = torch.from_numpy(np.array([words], dtype=np.uint32).view(np.float32))
    (read,) = round_trip([row], codec)
    if bool(FITS[codec](row).all()):
        assert same_bits(read, row.to(HALVES[codec]).float())
    else:
        assert same_bits(read, row)


def test_every_half_comes_back_and_what_is_between_goes_to_the_nearer():
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for codec, dtype in HALVES.items():
        exact = halves.view(dtype).float()
        exact = exact[FITS[codec](exact)]
        (read,) = round_trip([exact[:, None]], codec)
        assert same_bits(read[:, 0], exact)
        ordered = exact.sort().values.double()
        between = (ordered[:-1] * 0.7 + ordered[1:] * 0.3).float()
        (read,) = round_trip([between[:, None]], codec)
        assert same_bits(read[:, 0], between.to(dtype).float())


# --- int8 ----------------------------------------------------------------------


def int8_oracle(row):
    """Bounds of the errors of a row, (tokens, channels), from exact arithmetic."""
    tokens, channels = row.shape
    magnitudes = [[Fraction(abs(float(v))) for v in token] for token in row]
    ratios = []
    for c in range(channels):
        limit = 8 * sum(token[c] for token in magnitudes) / tokens
        for t in range(tokens):
            value = magnitudes[t][c]
            assume(limit == 0 or abs(value / limit - 1) > Fraction(1, 10**4))
            if value > limit:
                ratios.append((-float(value / limit), t, c))
    ratios.sort()
    places = math.ceil(row.numel() / PLACES_PER)
    if len(ratios) > places:  # the same in single precision
        assume(ratios[places][0] - ratios[places - 1][0] > 1e-4)
    apart = {(t, c) for _, t, c in ratios[:places]}
    bound = torch.zeros(tokens, channels, dtype=torch.float64)
    for c in range(channels):
        rest = [magnitudes[t][c] for t in range(tokens) if (t, c) not in apart]
        most = float(max(rest, default=Fraction(0)))
        bound[:, c] = most / 254 * (1 + 1e-4) if most >= 1e-30 else 1e-30
    for t, c in apart:
        bound[t, c] = 0.0 if magnitudes[t][c] >= 1e-30 else 1e-30
    return bound


@st.composite
def matrices(draw):
    tokens, channels = draw(st.integers(2, 40)), draw(st.integers(1, 24))
    seed = draw(st.integers(0, 2**32 - 1))
    row = drawn(tokens, channels, seed=seed)
    for _ in range(draw(st.integers(0, 8))):
        scale = draw(st.sampled_from([0.0, 1e-40, 1e-31, 1e-3, 30.0, 1e4, 1e28]))
        token = draw(st.integers(0, tokens - 1))
        channel = draw(st.integers(0, channels - 1))
        place = draw(st.sampled_from(["token", "channel", "value"]))
        if place == "token":
            row[token] *= scale
        elif place == "channel":
            row[:, channel] *= scale
        else:
            row[token, channel] = scale
    return row


@settings(max_examples=200, deadline=None)
@given(row=matrices())
def test_int8_keeps_outliers_exact_and_the_others_within_a_step(row):
    if not bool((row.abs() < 1e30).all()):
        assert same_bits(round_trip([row[None]], "int8")[0], row[None])
        return
    (read,) = round_trip([row[None]], "int8")
    assert ((read[0].double() - row.double()).abs() <= int8_oracle(row)).all()


def test_massive_values_of_a_token_do_not_cost_the_others_their_precision():
    row = drawn(64, 32)  # with places for eight
    row[3, :8] *= 1000.0
    (read,) = round_trip([row[None]], "int8")
    assert torch.equal(read[0, 3, :8], row[3, :8])
    others = torch.arange(64) != 3
    assert ((read[0] - row)[others].abs() <= 6 / 254).all()


def test_int8_is_as_precise_as_the_design_says():
    row = drawn(128, 256, seed=2) * torch.logspace(-3, 3, 256)
    (read,) = round_trip([row[None]], "int8")
    relative = (read[0] - row).norm(dim=0) / row.norm(dim=0)
    assert 0.003 < relative.max() < 0.01


@pytest.mark.parametrize("dtype", HALVES.values())
def test_int8_takes_sixteen_bits_with_the_error_of_both(dtype):
    row = (drawn(1, 40, 8) * 3).to(dtype)
    row[0, 7, 2] = 500.0
    (read,) = round_trip([row], "int8")
    assert read.dtype == dtype and read[0, 7, 2] == 500.0
    wide = round_trip([row.float()], "int8")[0]
    assert torch.equal(read, wide.to(dtype)) and not torch.equal(read, row)
    row[0, 3, 3] = math.inf
    assert torch.equal(round_trip([row], "int8")[0], row)


# --- what is left as it is -----------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "value", [torch.finfo(torch.float32).min, -math.inf, math.inf, math.nan, -1e30]
)
def test_additive_masks_are_never_changed(codec, value):
    mask = torch.zeros(3, 1, 4, 6)
    mask[1, 0, 1:, 3] = value
    (read,) = round_trip([mask], codec)
    assert same_bits(read, mask)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.complex64, torch.int64, torch.int8, torch.bool],
)
def test_other_types_are_left_alone(codec, dtype):
    tensor = (drawn(2, 5, 4) * 9).to(dtype)
    assert torch.equal(round_trip([tensor], codec)[0], tensor)


def test_a_codec_of_two_bytes_leaves_two_bytes_and_int8_needs_tokens():
    for codec, dtype in itertools.product(HALVES, HALVES.values()):
        tensor = drawn(2, 5, 4).to(dtype)
        assert torch.equal(round_trip([tensor], codec)[0], tensor)
    for shape in [(2,), (2, 50), (2, 1, 50), (2, 2, 1), (2, 0, 4), (2, 4, 0)]:
        assert torch.equal(round_trip([drawn(*shape)], "int8")[0], drawn(*shape))
    for codec in LOSSY:  # numbers of their own
        assert torch.equal(round_trip([drawn(9)], codec)[0], drawn(9))


@pytest.mark.parametrize("codec", LOSSY)
def test_one_row_with_a_mark_costs_no_other_row_its_codec(codec):
    rows = drawn(4, TOKENS, CHANNELS)
    rows[2, 3, 4] = -math.inf
    cache, ids = make_cache(ragged=True), torch.arange(4)
    cache.store(ids, (rows,), boundary=1, fingerprint=1, codec=codec)
    (found,) = cache.fetch(ids, chain=[0, 1], codec=codec)
    assert found.lossy and same_bits(found.tensors[0][2], rows[2])
    for row in (0, 1, 3):
        assert not torch.equal(found.tensors[0][row], rows[row])
    (plain,) = cache.fetch(ids, chain=[0, 1])
    assert plain.rows.tolist() == [2] and not plain.lossy


def test_an_unknown_codec_is_an_error():
    cache, ids = make_cache(), torch.arange(2)
    for call in (
        lambda: cache.fetch(ids, chain=[0], codec="int4"),
        lambda: cache.store(ids, (ids,), boundary=1, fingerprint=1, codec="int4"),
        lambda: round_trip([ids], "int4"),
    ):
        with pytest.raises(ValueError, match="codec: expected native, .* got int4"):
            call()


# --- records -------------------------------------------------------------------


def parts(count, seed=0):
    """Hidden states, an additive mask, lengths: what crosses a boundary."""
    mask = torch.zeros(count, 1, 1, TOKENS)
    mask[:, :, :, -2:] = torch.finfo(torch.float32).min
    return drawn(count, TOKENS, CHANNELS, seed=seed), mask, torch.arange(count)


def encoded_size(codec):
    count = TOKENS * CHANNELS
    if codec == "int8":
        return 4 * CHANNELS + 8 * math.ceil(count / PLACES_PER) + count
    return {"native": 4, "bf16": 2, "fp16": 2}[codec] * count


@pytest.mark.parametrize("codec", ["native", *LOSSY])
def test_a_record_is_read_as_its_codec_makes_it_and_takes_the_bytes_it_says(codec):
    cache, ids = make_cache(ragged=True, verify="all"), torch.randperm(SAMPLES)
    tensors = parts(SAMPLES)
    stored = cache.store(ids, tensors, boundary=1, fingerprint=1, codec=codec)
    assert stored == SAMPLES
    (found,) = cache.fetch(ids.flip(0), chain=[0, 1], codec=codec)
    assert found.lossy == (codec != "native")
    expected = round_trip(tensors, codec)
    for got, made in zip(found.tensors, expected, strict=True):
        assert torch.equal(got, made.flip(0))
    assert torch.equal(expected[1], tensors[1]) and torch.equal(expected[2], tensors[2])
    assert torch.equal(expected[0], tensors[0]) == (codec == "native")
    rest = record_bytes([tensors[1][:1], tensors[2][:1]])
    whole = rest + -(-encoded_size(codec) // 8) * 8
    assert cache.used_bytes == SAMPLES * (-(-whole // 64) * 64)


def test_records_of_another_codec_are_misses_and_replaced():
    cache, ids, tensors = make_cache(ragged=True), torch.arange(8), parts(8)
    key = dict(boundary=1, fingerprint=1)
    for kept, asked in itertools.permutations(LOSSY, 2):
        cache.clear()
        assert cache.store(ids, tensors, **key, codec=kept) == 8
        before = cache.counters
        assert cache.fetch(ids, chain=[0, 1], codec=asked) == []
        assert cache.fetch(ids, chain=[0, 1]) == []
        assert cache.counters.stale - before.stale == 16
        assert cache.store(ids, tensors, **key, codec=kept) == 0  # there already
        assert cache.store(ids, tensors, **key, codec=asked) == 8
        (found,) = cache.fetch(ids, chain=[0, 1], codec=asked)
        assert torch.equal(found.tensors[0], round_trip(tensors, asked)[0])
        assert cache.store(ids, tensors, **key) == 8
        for codec in ("native", *LOSSY):  # serves all, and stays
            assert cache.store(ids, tensors, **key, codec=codec) == 0
            (found,) = cache.fetch(ids, chain=[0, 1], codec=codec)
            assert torch.equal(found.tensors[0], tensors[0]) and not found.lossy


def test_native_and_encoded_records_of_a_batch_are_one_group():
    cache, ids, tensors = make_cache(ragged=True), torch.arange(8), parts(8)
    for rows, codec in ((ids[:3], "native"), (ids[3:], "int8")):
        some = tuple(t[rows] for t in tensors)
        cache.store(rows, some, boundary=1, fingerprint=1, codec=codec)
    (found,) = cache.fetch(ids, chain=[0, 1], codec="int8")
    assert found.lossy and found.rows.tolist() == list(range(8))
    assert torch.equal(found.tensors[0][:3], tensors[0][:3])
    assert torch.equal(found.tensors[0][3:], round_trip(tensors, "int8")[0][3:])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_of_any_length_are_encoded_by_themselves(data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    codec, padded = data.draw(st.sampled_from(LOSSY)), max(lengths) + 1
    ragged = Ragged(lambda inputs: None, fill=(0.5, 0))
    hidden = drawn(len(lengths), padded, 20)
    mask = torch.ones(len(lengths), padded, dtype=torch.bool)
    ids, sizes = torch.arange(len(lengths)), torch.tensor(lengths)
    cache = make_cache(ragged=True)
    made = dict(ragged=ragged, lengths=sizes)
    tensors, key = (hidden, mask), dict(boundary=1, fingerprint=1)
    assert cache.store(ids, tensors, **key, **made, codec=codec) == len(lengths)
    (found,) = cache.fetch(ids, chain=[0, 1], ragged=ragged, length=12, codec=codec)
    batch = round_trip(tensors, codec, **made)
    assert torch.equal(batch[1], mask)
    for row, length in enumerate(lengths):
        alone = hidden[row : row + 1, :length]
        (expected,) = round_trip([alone], codec)
        assert torch.equal(found.tensors[0][row, :length], expected[0])
        assert (found.tensors[0][row, length:] == 0.5).all()
        assert torch.equal(batch[0][row, :length], expected[0])
        assert torch.equal(batch[0][row, length:], hidden[row, length:])


@pytest.mark.parametrize("dim", [2, 3])
def test_the_padded_dim_may_be_any(dim):
    ragged, lengths = Ragged(lambda inputs: None, dim=dim), torch.tensor([4, 2, 7])
    hidden = drawn(3, 8, 5, 6).movedim(1, dim)
    (read,) = round_trip([hidden], "bf16", ragged=ragged, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        rounded = hidden[row].bfloat16().float().narrow(dim - 1, 0, length)
        assert torch.equal(read[row].narrow(dim - 1, 0, length), rounded)
        rest = hidden[row].narrow(dim - 1, length, 8 - length)
        assert torch.equal(read[row].narrow(dim - 1, length, 8 - length), rest)


def test_equal_rows_give_equal_bytes_whatever_the_threads(tmp_path):
    rows = drawn(SAMPLES, 200, 64)  # enough for several tasks
    rows[:, ::50, ::7] *= 100.0
    before, files = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cache = make_cache(ragged=True, slot_bytes=1 << 16)
            cache.store(
                torch.arange(SAMPLES), (rows,), boundary=1, fingerprint=1, codec="int8"
            )
            keeper = CacheFolder(tmp_path / str(threads))
            keeper.make()
            keeper.load(make_cache(), "train", 1)
            keeper.save(cache, "train", 1)
            files.append(keeper.path_of("train", 1, SAMPLES).read_bytes())
    finally:
        torch.set_num_threads(before)
    assert files[0] == files[1]


def test_files_keep_the_encoding_and_a_native_run_takes_none_of_it(tmp_path):
    tensors, ids = parts(SAMPLES), torch.arange(SAMPLES)
    cache, keeper = make_cache(ragged=True), CacheFolder(tmp_path)
    keeper.load(cache, "train", 1)
    cache.store(ids, tensors, boundary=1, fingerprint=1, codec="int8")
    keeper.save(cache, "train", 1)
    for ragged in (False, True):  # as a slab of native records has it, and of others
        other = make_cache(ragged=ragged)
        assert CacheFolder(tmp_path).load(other, "train", 1) == SAMPLES
        assert other.fetch(ids, chain=[0, 1]) == []
        assert other.counters.stale == SAMPLES
        (found,) = other.fetch(ids, chain=[0, 1], codec="int8")
        assert torch.equal(found.tensors[0], round_trip(tensors, "int8")[0])
        assert other.store(ids, tensors, boundary=1, fingerprint=1) == SAMPLES
        (found,) = other.fetch(ids, chain=[0, 1])
        assert torch.equal(found.tensors[0], tensors[0])


# --- damage --------------------------------------------------------------------


def payload_place(cache):
    """Where the payload of sample 0 begins in the memory of a cache."""
    with open(f"/proc/self/fd/{descriptor(cache)}", "rb") as file:
        memory = file.read()
    (word,) = struct.unpack_from("<Q", memory, INDEX)
    return SLOTS + word % 2**37 * 64, memory


HEADER_BYTES = 232


@pytest.mark.parametrize("codec", LOSSY)
def test_no_flipped_bit_of_an_encoded_record_is_served(codec):
    draw, row = random.Random(1), drawn(1, TOKENS, CHANNELS)
    row[0, 3, 3] = 200.0
    cache, ids = make_cache(ragged=True, verify="all"), torch.arange(1)
    for turn in range(200):
        cache.store(ids, (row,), boundary=1, fingerprint=1, codec=codec)
        place, memory = payload_place(cache)
        at = place + 8 + draw.randrange(HEADER_BYTES + encoded_size(codec))
        with open(f"/proc/self/fd/{descriptor(cache)}", "r+b") as file:
            file.seek(at)
            file.write(bytes([memory[at] ^ 1 << draw.randrange(8)]))
        assert cache.fetch(ids, chain=[0, 1], codec=codec) == [], (turn, at - place)


def write_crafted(cache, offset, content):
    """Change bytes of the payload of sample 0, under checksums that fit."""
    place, memory = payload_place(cache)
    header = bytearray(memory[place + 8 : place + 8 + HEADER_BYTES])
    size = encoded_size("int8")
    begin = place + 8 + HEADER_BYTES
    payload = bytearray(memory[begin : begin + size])
    (checksum,) = struct.unpack_from("<Q", header, 40)
    assert _C.core.hash_bytes(bytes(payload)) == checksum, "the layout has changed"
    payload[offset : offset + len(content)] = content
    struct.pack_into("<Q", header, 40, _C.core.hash_bytes(bytes(payload)))
    struct.pack_into("<Q", header, 224, _C.core.hash_bytes(bytes(header[:224])))
    with open(f"/proc/self/fd/{descriptor(cache)}", "r+b") as file:
        file.seek(place + 8)
        file.write(header + payload)


def read_crafted(index):
    row = drawn(1, TOKENS, CHANNELS)
    row[0, 3, 3] = 200.0
    ids = torch.arange(1)
    cache = make_cache(ragged=True, verify="all")
    cache.store(ids, (row,), boundary=1, fingerprint=1, codec="int8")
    write_crafted(cache, 4 * CHANNELS, struct.pack("<If", index, 7.25))
    found = cache.fetch(ids, chain=[0, 1], codec="int8")
    if index < TOKENS * CHANNELS:
        assert found[0].tensors[0].flatten()[index] == 7.25
        return
    assert found == [] and cache.counters.corrupt == 1
    # It does not stay in the way of the record that is computed instead.
    assert cache.store(ids, (row,), boundary=1, fingerprint=1, codec="int8") == 1
    (found,) = cache.fetch(ids, chain=[0, 1], codec="int8")
    assert found.tensors[0][0, 3, 3] == 200.0


COUNT = TOKENS * CHANNELS


@pytest.mark.parametrize("index", [0, COUNT - 1, COUNT, 2**24, 2**31, 2**32 - 2])
def test_an_outlier_that_lies_outside_of_its_row_is_a_corrupt_record(index):
    assert outcome(read_crafted, index) == 0


def read_any_codec(codec):
    cache, ids = make_cache(ragged=True, verify="all"), torch.arange(1)
    cache.store(
        ids, (drawn(1, TOKENS, CHANNELS),), boundary=1, fingerprint=1, codec="int8"
    )
    place, memory = payload_place(cache)
    header = bytearray(memory[place + 8 : place + 8 + HEADER_BYTES])
    assert header[56 + 1] == 3, "the layout of a header has changed"
    header[56 + 1] = codec
    struct.pack_into("<Q", header, 224, _C.core.hash_bytes(bytes(header[:224])))
    with open(f"/proc/self/fd/{descriptor(cache)}", "r+b") as file:
        file.seek(place + 8)
        file.write(header)
    for asked in ("native", *LOSSY):
        found = merged(cache.fetch(ids, chain=[0, 1], codec=asked), 1)
        assert bool(found) == (codec == 3 and asked == "int8")


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4, 255])
def test_a_record_that_names_another_codec_than_its_bytes_have_is_missed(codec):
    assert outcome(read_any_codec, codec) == 0
