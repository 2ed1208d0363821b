"""Rows for the ops of the codecs, and what must hold of them, on CPU and CUDA."""

import torch

from pipetransformer.autocache import Ragged, round_trip
from pipetransformer.autocache._ops import decode_rows, encode_rows

NUMBERS = {"bf16": 1, "fp16": 2, "int8": 3}
CASES = [
    *((codec, torch.float32) for codec in NUMBERS),
    *(("int8", dtype) for dtype in (torch.float16, torch.bfloat16)),
]
# Around the places of outliers, of few and of many channels, and what int8 leaves.
SHAPES = [(9, 24, 40), (9, 6, 4, 40), (9, 300, 7), (9, 2, 300), (9, 40), (2, 1, 1, 24)]
FILL = 0.5


def same_bits(one, other):
    """Tell whether tensors are equal to the last bit, NaNs and zeros' signs too."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = sizes[one.element_size()]
    return one.dtype == other.dtype and torch.equal(
        one.cpu().contiguous().view(words), other.cpu().contiguous().view(words)
    )


def mixed_rows(dtype, shape, seed=0):
    """Rows with outliers, ties, tiny and vanishing values, and marks of masks."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator)
    flat = rows.view(len(rows), -1, shape[-1])
    some = torch.rand(flat.shape, generator=generator)
    if len(flat) > 6:
        flat[0][some[0] > 0.97] *= 500.0  # more than there are places for
        flat[1] = (some[1] > 0.95).float()  # all of them as far above as each other
        flat[2][:, ::3] *= 1e-40
        flat[3] = (some[3] > 0.99).float() * 1e-45
        flat[4][0, 0] = -torch.inf
        flat[5][-1, 0] = 1e30 if dtype == torch.float32 else torch.nan
        flat[6] = 0.0
        flat[6][:, -1] = -0.0
    return rows.to(dtype)


def lengths_of(rows):
    """Lengths from nothing to all."""
    most = rows.shape[1]
    return torch.tensor([(most - 5 * k) % (most + 1) for k in range(len(rows))])


def of_any_device(op, *arguments):
    """Call the implementation of an op that serves devices without one of their own."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return getattr(torch.ops.pipetransformer, op).default._op_dk(key, *arguments)


def batch_of(encoded, offsets, kept, lengths, rows, codec):
    """Arguments of `decode_rows` for the rows that are encoded."""
    kept = kept.cpu()
    codecs = torch.full((int(kept.sum()),), NUMBERS[codec], dtype=torch.uint8)
    lengths = None if lengths is None else lengths[kept]
    sizes = list(rows.shape[1:])
    return encoded, offsets[kept], codecs, lengths, sizes, rows.dtype, FILL


def as_read(rows, lengths, codec):
    """What records of these rows give, by the codec of the host."""
    ragged = None if lengths is None else Ragged(lambda inputs: None)
    (read,) = round_trip([rows.cpu()], codec, ragged=ragged, lengths=lengths)
    for row, length in enumerate([] if lengths is None else lengths.tolist()):
        read[row, length:] = FILL
    return read


def assert_equal_rows(one, other):
    """Compare what `encode_rows` gives: the bytes of rows that are encoded."""
    (bytes_one, begins, kept), (bytes_other, begins_other, kept_other) = one, other
    assert torch.equal(begins, begins_other)
    assert torch.equal(kept.cpu(), kept_other.cpu())
    ends = [*begins.tolist()[1:], len(bytes_one)]
    for begin, end, is_kept in zip(begins.tolist(), ends, kept.tolist(), strict=True):
        row, row_other = bytes_one[begin:end].cpu(), bytes_other[begin:end].cpu()
        assert not is_kept or torch.equal(row, row_other)


def check_both_ways(rows, lengths, codec):
    """Encode and decode rows where they are; compare with the host, bit for bit."""
    encoded = encode_rows(rows, lengths, NUMBERS[codec])
    assert encoded[0].device == encoded[2].device == rows.device
    assert_equal_rows(encoded, encode_rows(rows.cpu(), lengths, NUMBERS[codec]))
    read, whole = decode_rows(*batch_of(*encoded, lengths, rows, codec))
    assert read.device == whole.device == rows.device
    kept = encoded[2].cpu()
    assert whole.all() and same_bits(read, as_read(rows, lengths, codec)[kept])
    return kept


def garbage(codec, dtype, sizes, seed):
    """Arguments of `decode_rows` for rows of random bytes, some of them near valid."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((6, *sizes), generator=generator).to(dtype)
    encoded, offsets, kept = encode_rows(rows, None, NUMBERS[codec])
    size = len(encoded) // 6
    noise = torch.randint(0, 256, encoded.shape, generator=generator).to(torch.uint8)
    encoded[: 2 * size] = noise[: 2 * size]
    for row in (2, 3):  # a byte or two
        at = torch.randint(0, size, (2,), generator=generator) + row * size
        encoded[at] = noise[at]
    if codec == "int8":  # an outlier anywhere
        place = 4 * size + 4 * sizes[-1]
        encoded[place : place + 4] = noise[place : place + 4]
        encoded[place + 1 : place + 4] &= seed % 2 * 255
    return batch_of(encoded, offsets, kept, None, rows, codec)
