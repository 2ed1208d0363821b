"""Bytes of others become text that a terminal may show."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer._C.core import plain_text

DIRECTIONS = {*"\u061c\u200e\u200f", *map(chr, range(0x2028, 0x202F))}
DIRECTIONS |= {*map(chr, range(0x2066, 0x206A))}


def is_harmless(letter):
    return unicodedata.category(letter) not in ("Cc", "Cs") and letter not in DIRECTIONS


@given(data=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_what_is_no_text_or_obeyed_by_a_terminal_is_replaced(data):
    shown = plain_text(data)
    assert all(map(is_harmless, shown))
    letters = "".join(
        letter if is_harmless(letter) else " "
        for letter in data.decode(errors="surrogateescape")
        if not "\udc80" <= letter <= "\udcff"
    )
    assert shown.replace("\ufffd", "") == letters.replace("\ufffd", "")


@given(text=st.text(max_size=100))
def test_harmless_text_stays_as_it_is(text):
    text = "".join(filter(is_harmless, text))
    assert plain_text(text.encode()) == text


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\x1b]0;x\x07\x1b[2J", " ]0;x  [2J"),
        (b"a\r\nb\tc\x7f\xc2\x9bd", "a  b c  d"),
        ("\u202eevil".encode(), " evil"),
        ("a\u061c1\u200e2\u2069".encode(), "a 1 2 "),
        (b"\xc0\xaf", "\ufffd\ufffd"),  # a slash in two bytes
        (b"\xe0\x80\xaf", "\ufffd\ufffd\ufffd"),
        (b"\xf0\x80\x80\xaf", "\ufffd" * 4),
        (b"\xed\xa0\x80", "\ufffd" * 3),  # half of a surrogate pair
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),  # above U+10FFFF
        (b"\xe2\x82", "\ufffd\ufffd"),
        ("\u20ac\U0010ffff\ud7ff\ue000".encode(), "\u20ac\U0010ffff\ud7ff\ue000"),
        (b"\xff" + b"a", "\ufffda"),
    ],
)
def test_escapes_and_broken_letters(data, shown):
    assert plain_text(data) == shown


@given(
    data=st.binary(max_size=60) | st.text(max_size=30).map(str.encode),
    longest=st.integers(0, 40),
)
def test_a_cut_falls_between_letters_and_shows(data, longest):
    whole, cut = plain_text(data), plain_text(data, longest)
    if len(whole.encode()) <= longest:
        assert cut == whole
        return
    assert cut.endswith("...")
    kept = cut.removesuffix("...")
    assert whole.startswith(kept)
    following = whole[len(kept)]
    assert len(kept.encode()) <= longest < len((kept + following).encode())


def test_megabytes_are_cut():
    assert len(plain_text(b"\x1b" * 10_000_000)) == 4096 + 3
