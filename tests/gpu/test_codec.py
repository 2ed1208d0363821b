"""The ops encode_rows and decode_rows on a CUDA device: kernel or ATen, same bits."""

import pytest
import torch

from pipetransformer.autocache import ActivationCache
from pipetransformer.autocache._ops import decode_rows, encode_rows
from tests.support.codec import (
    CASES,
    NUMBERS,
    SHAPES,
    assert_equal_rows,
    batch_of,
    check_both_ways,
    garbage,
    lengths_of,
    mixed_rows,
    of_any_device,
    same_bits,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("codec", "dtype"), CASES)
def test_rows_on_cuda_have_the_bits_of_the_host(codec, dtype, shape, ragged):
    rows = mixed_rows(dtype, shape)
    lengths = lengths_of(rows) if ragged else None
    check_both_ways(rows.cuda(), lengths, codec)


@pytest.mark.parametrize(("codec", "dtype"), CASES)
def test_large_rows_on_cuda_have_the_bits_of_the_host(codec, dtype):
    rows = torch.cat([mixed_rows(dtype, (9, 197, 768), seed) for seed in range(3)])
    check_both_ways(rows.cuda(), None, codec)
    check_both_ways(rows.cuda(), lengths_of(rows), codec)


def test_aten_on_cuda_gives_the_same_bits():
    rows = mixed_rows(torch.float32, (9, 24, 40)).cuda()
    for codec, number in NUMBERS.items():
        encoded = of_any_device("encode_rows", rows, None, number)
        assert_equal_rows(encoded, encode_rows(rows.cpu(), None, number))
        batch = batch_of(*encoded, None, rows, codec)
        assert same_bits(
            of_any_device("decode_rows", *batch)[0], decode_rows(*batch)[0]
        )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("codec", "dtype"), CASES)
def test_any_bytes_on_cuda_give_the_bits_of_the_host_or_are_reported(
    codec, dtype, seed
):
    encoded, *batch = garbage(codec, dtype, (12, 10), seed)
    expected, valid = decode_rows(encoded, *batch)
    read, whole = decode_rows(encoded.cuda(), *batch)
    assert torch.equal(whole.cpu(), valid)
    assert same_bits(read.cpu()[valid], expected[valid])


def test_rows_on_cuda_wait_for_the_current_stream():
    rows = mixed_rows(torch.float32, (9, 24, 40))
    expected = encode_rows(rows, None, 3)
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros_like(rows, device="cuda")
        source = rows.cuda()
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        assert_equal_rows(encode_rows(late, None, 3), expected)


@pytest.mark.parametrize("codec", NUMBERS)
def test_records_on_cuda_are_those_of_the_host(codec):
    rows = mixed_rows(torch.float32, (9, 24, 40))
    cache = ActivationCache.create(
        run_id="run",
        num_samples=18,
        slot_bytes=8192,
        budget_bytes=1 << 20,
        verify="all",
    )
    ids, key = torch.arange(9), dict(boundary=1, fingerprint=1, codec=codec)
    assert cache.store(ids, (rows,), **key) == 9
    assert cache.store(ids + 9, (rows.cuda(),), **key) == 9
    (here,) = cache.fetch(torch.arange(18), chain=[0, 1], codec=codec)
    (there,) = cache.fetch(
        torch.arange(18), chain=[0, 1], codec=codec, device=torch.device("cuda", 0)
    )
    assert there.tensors[0].is_cuda and there.lossy
    assert same_bits(there.tensors[0], here.tensors[0])
    assert same_bits(here.tensors[0][:9], here.tensors[0][9:])
