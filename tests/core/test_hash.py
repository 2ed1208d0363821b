from hypothesis import given
from hypothesis import strategies as st

from pipetransformer._C.core import hash_bytes


@given(st.binary(max_size=200))
def test_hash_is_a_function_of_bytes_and_seed(data):
    assert hash_bytes(data) == hash_bytes(bytes(bytearray(data)))
    assert hash_bytes(data, 1) != hash_bytes(data, 2)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_hash_sees_every_single_bit(data, draw):
    position = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[position // 8] ^= 1 << (position % 8)
    assert hash_bytes(bytes(flipped)) != hash_bytes(data)


def test_hash_sees_length_of_zero_bytes():
    assert len({hash_bytes(b"\0" * n) for n in range(100)}) == 100
