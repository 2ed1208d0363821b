"""The ops encode_rows and decode_rows on CPU, and what any other device has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autocache._ops import decode_rows, encode_rows
from tests.support.codec import (
    CASES,
    FILL,
    NUMBERS,
    SHAPES,
    as_read,
    assert_equal_rows,
    batch_of,
    check_both_ways,
    garbage,
    lengths_of,
    mixed_rows,
    of_any_device,
    same_bits,
)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("codec", "dtype"), CASES)
def test_all_implementations_give_the_bits_of_records(codec, dtype, shape, ragged):
    rows = mixed_rows(dtype, shape)
    lengths = lengths_of(rows) if ragged else None
    kept = check_both_ways(rows, lengths, codec)
    encoded = encode_rows(rows, lengths, NUMBERS[codec])
    assert_equal_rows(
        of_any_device("encode_rows", rows, lengths, NUMBERS[codec]), encoded
    )
    batch = batch_of(*encoded, lengths, rows, codec)
    read, whole = of_any_device("decode_rows", *batch)
    assert whole.all() and same_bits(read, as_read(rows, lengths, codec)[kept])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_choice_of_outliers_is_the_same(data):
    tokens, channels = data.draw(st.integers(2, 30)), data.draw(st.integers(1, 30))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rows = torch.randn(
        3, tokens, channels, generator=torch.Generator().manual_seed(seed)
    )
    if data.draw(st.booleans()):
        rows = rows.round()  # ties
    for _ in range(data.draw(st.integers(0, 12))):
        place = [data.draw(st.integers(0, size - 1)) for size in rows.shape]
        scales = [1e-45, 1e-40, 1e-30, 9.0, 30.0, 64.0, 1e4, 9e29, torch.inf]
        rows[tuple(place)] = data.draw(st.sampled_from(scales))
    lengths = None
    if data.draw(st.booleans()):
        each = st.integers(0, tokens)
        lengths = torch.tensor([data.draw(each) for _ in range(3)])
    assert_equal_rows(
        of_any_device("encode_rows", rows, lengths, 3), encode_rows(rows, lengths, 3)
    )


@settings(max_examples=100, deadline=None)
@given(
    case=st.sampled_from(CASES),
    sizes=st.tuples(st.integers(8, 20), st.integers(8, 20)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bytes_give_equal_bits_or_are_reported(case, sizes, seed):
    batch = garbage(*case, sizes, seed)
    read, whole = decode_rows(*batch)
    other, whole_other = of_any_device("decode_rows", *batch)
    assert torch.equal(whole, whole_other)
    assert same_bits(read[whole], other[whole])
    assert whole.all() or case[0] == "int8"


def test_an_outlier_beyond_its_row_is_reported_and_written_nowhere():
    rows = torch.randn(3, 8, 16)
    encoded, offsets, kept = encode_rows(rows, None, 3)
    place = int(offsets[1]) + 4 * 16
    batch = batch_of(encoded, offsets, kept, None, rows, "int8")
    for index in (128, 129, 2**31, 2**32 - 2):
        encoded[place : place + 4] = torch.tensor([index]).view(torch.uint8)[:4]
        for decode in (decode_rows, lambda *args: of_any_device("decode_rows", *args)):
            read, whole = decode(*batch)
            assert whole.tolist() == [True, False, True]
            assert same_bits(read[[0, 2]], as_read(rows, None, "int8")[[0, 2]])


def test_native_rows_among_encoded_ones_are_copied_as_they_are():
    rows, lengths = mixed_rows(torch.float32, (9, 24, 40)), torch.full((9,), 20)
    encoded, offsets, kept = encode_rows(rows, lengths, 3)
    native = rows[~kept][:, :20].reshape(-1).view(torch.uint8)
    size = 20 * 40 * 4
    begins = len(encoded) + size * torch.arange(int((~kept).sum()))
    offsets[~kept] = begins
    codecs = torch.where(kept, 3, 0).to(torch.uint8)
    batch = (torch.cat([encoded, native]), offsets, codecs, lengths, [24, 40])
    for decode in (decode_rows, lambda *args: of_any_device("decode_rows", *args)):
        read, whole = decode(*batch, torch.float32, FILL)
        assert whole.all() and same_bits(read, as_read(rows, lengths, "int8"))


@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(24).view(2, 3, 4),
        torch.ones(2, 3, 4, dtype=torch.float64),
        torch.ones(0, 3, 4),
        torch.ones(2, 3, 0),
        torch.ones(2),
        torch.ones(2, *[1] * 8),
    ],
)
def test_what_a_codec_does_not_take_has_no_bytes(rows):
    for encode in (encode_rows, lambda *args: of_any_device("encode_rows", *args)):
        encoded, offsets, kept = encode(rows, None, 3)
        assert len(encoded) == 0 and offsets.tolist() == [0] * len(rows)
        assert kept.tolist() == [False] * len(rows)


def test_strides_and_places_in_memory_do_not_matter():
    rows = mixed_rows(torch.float32, (9, 24, 40))
    across = torch.empty(9, 40, 24).movedim(1, 2).copy_(rows)
    encoded = encode_rows(across, None, 3)
    assert_equal_rows(encoded, encode_rows(rows, None, 3))
    bytes_, *batch = batch_of(*encoded, None, rows, "int8")
    moved = torch.cat([bytes_[:3], bytes_])[3:]
    expected = decode_rows(bytes_, *batch)[0]
    assert same_bits(decode_rows(moved, *batch)[0], expected)
    assert same_bits(of_any_device("decode_rows", moved, *batch)[0], expected)


BATCH = (
    torch.zeros(64, dtype=torch.uint8),
    torch.tensor([0, 32]),
    torch.tensor([1, 1], dtype=torch.uint8),
    None,
    [4, 4],
    torch.float32,
    0.0,
)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, torch.zeros(64), "encoded: expected one dim of Byte, got Float"),
        (1, torch.tensor([0, 40]), "offsets: expected multiples of 8 with 32 bytes"),
        (1, torch.tensor([0, 28]), "offsets: expected multiples of 8 .*, got 28"),
        (1, torch.tensor([0, -8]), "offsets: expected multiples of 8 .*, got -8"),
        (1, torch.tensor([0, 2**62]), "offsets: expected multiples of 8"),
        (2, torch.tensor([1, 4], dtype=torch.uint8), r"codecs: expected 0..3, got 4"),
        (2, torch.tensor([1, 1]), "codecs: expected Byte of shape .*, got Long"),
        (3, torch.tensor([4, 5]), r"lengths: expected 0..4 \(the padded .*, got 5"),
        (3, torch.tensor([4]), r"lengths: expected Long of shape \(2,\) on the host"),
        (4, [4, -1], "sizes: expected those of a row of a record"),
        (4, [2**31, 2**31], "sizes: expected those of a row of a record"),
        (4, [1] * 7, "sizes: expected those of a row of a record"),
        (5, torch.float64, "dtype: expected Float, Half or BFloat16, got Double"),
        (6, 1e39, "fill: expected a value that Float holds, got 1e"),
        (5, torch.float16, "codecs: expected one that takes row 0, got 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(place, value, text):
    batch = [*BATCH[:place], value, *BATCH[place + 1 :]]
    for decode in (decode_rows, lambda *args: of_any_device("decode_rows", *args)):
        assert len(decode(*BATCH)[0]) == 2
        with pytest.raises(ValueError, match=text):
            decode(*batch)


@pytest.mark.parametrize(
    ("rows", "lengths", "codec", "text"),
    [
        (torch.ones(2, 3), None, 0, "codec: expected 1..3, got 0"),
        (torch.ones(2, 3), None, 4, "codec: expected 1..3, got 4"),
        (torch.ones(()), None, 1, "rows: expected at least 1 dims"),
        (torch.ones(2), torch.ones(2).long(), 1, "rows: expected at least 2 dims"),
        (torch.ones(2, 3), torch.tensor([3, 4]), 1, "lengths: expected 0..3"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, lengths, codec, text):
    for encode in (encode_rows, lambda *args: of_any_device("encode_rows", *args)):
        with pytest.raises(ValueError, match=text):
            encode(rows, lengths, codec)
