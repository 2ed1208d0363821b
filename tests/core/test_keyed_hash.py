"""The keyed hash of the control plane is HMAC-SHA256, as Python's `hmac` has it."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer._C.core import keyed_hash


def expected(key, data):
    return hmac.new(key, data, hashlib.sha256).digest()


# RFC 4231, section 4: cases 1, 2, 3, 6 and 7.
CASES = [
    (
        b"\x0b" * 20,
        b"Hi There",
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7",
    ),
    (
        b"Jefe",
        b"what do ya want for nothing?",
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
    ),
    (
        b"\xaa" * 20,
        b"\xdd" * 50,
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe",
    ),
    (
        b"\xaa" * 131,
        b"Test Using Larger Than Block-Size Key - Hash Key First",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
    ),
]


@pytest.mark.parametrize(("key", "data", "digest"), CASES)
def test_published_digests(key, data, digest):
    assert keyed_hash(key, data).hex() == digest


def test_every_length_around_the_blocks():
    for size in range(300):
        data = bytes(i * 7 % 256 for i in range(size))
        assert keyed_hash(b"key", data) == expected(b"key", data), size
        assert keyed_hash(data, b"data") == expected(data, b"data"), size


@given(key=st.binary(max_size=200), data=st.binary(max_size=2000))
def test_any_key_and_data(key, data):
    assert keyed_hash(key, data) == expected(key, data)


def test_megabytes():
    data = bytes(range(256)) * 20_000
    assert keyed_hash(b"key", data) == expected(b"key", data)
