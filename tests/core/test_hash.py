from hypothesis import given
from hypothesis import strategies as st

from pipetransformer import _C


@given(st.binary(max_size=200))
def test_hash_is_a_function_of_bytes_and_seed(data):
    assert _C.hash_bytes(data) == _C.hash_bytes(bytes(bytearray(data)))
    assert _C.hash_bytes(data, 1) != _C.hash_bytes(data, 2)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_hash_sees_every_single_bit(data, draw):
    position = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[position // 8] ^= 1 << (position % 8)
    assert _C.hash_bytes(bytes(flipped)) != _C.hash_bytes(data)


def test_hash_sees_length_of_zero_bytes():
    assert len({_C.hash_bytes(b"\0" * n) for n in range(100)}) == 100
