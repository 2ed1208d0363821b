"""Damaged copies of bytes, of JSON texts, of trees of plain values, and of archives."""

from __future__ import annotations

import io
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.serialization import set_crc32_options

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
MEANING = b'{}[],:"0123456789-.eE\\ntf\xff\xc3'  # bytes that JSON or UTF-8 act on
VALUES = [
    *("null", "true", "false", "[]", "{}", '""', "0", "1", "-1", "1.0", "1.5", "1e5"),
    *("1e999", "-0.0", str(2**62), str(2**62 + 1), str(2**64), "9" * 400, "2.0"),
    *('"\\ud800"', '"\\u0000"', '"\u00e9"', '"gpipe"', '"none"', '{"a": 1}'),
    *("[1, 2, 3]", "[[0, 1]]", "[" * 200 + "]" * 200, '{"a":' * 99 + "1" + "}" * 99),
    *('"\\u001b]0;x\\u0007\\u001b[2J"', '"\\u009b2J"', '{"\\u001b[2J": 1}'),
]
BROKEN = [
    *("NaN", "Infinity", "-Infinity", "01", "0x1", "+1", "1_0", "9" * 5000, '"x'),
    *("[" * 200, "]" * 5, "\u0661", "\ufeff", "'a'", "// x", "undefined", "\t", '"\t"'),
]
LARGE = [
    f'"{"x" * 300_000}"',
    f'"{"x y " * 50_000}"',
    f"[{'0, ' * 50_000}1]",
    f"[{'{}, ' * 20_000}{{}}]",
    f"{{{', '.join(f'{chr(34)}{n}{chr(34)}: 1' for n in range(20_000))}}}",
]
ONE_IN_LARGE = 100

_PICKLES = [
    b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",  # calls a function
    b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
    b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",  # nested deeply
    b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",  # says it is long
    b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b".",
    b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    b"\x80\x02}q\x00h\x05.",  # no such memo
    b".",
    b"",
]


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, remove, insert, repeat or move some bytes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, length = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 8, 64))
        kind = rng.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del found[at : at + length]
        elif kind == 2:
            found[at:at] = rng.randbytes(length)
        elif kind == 3:
            found[at:at] = found[at : at + length]
        elif kind == 4:
            found[at : at + 1] = bytes([rng.choice(MEANING)])
        else:
            del found[at:]
    return bytes(found)


def damaged_tokens(
    rng: random.Random, tokens: Sequence[str], scalars: Sequence[str]
) -> bytes:
    """Replace values and names, mostly; remove, repeat or break, sometimes.

    Args:
        rng: What decides.
        tokens: A JSON text's, by `TOKEN`.
        scalars: Numbers, strings and names that may stand in place of another.
    """
    found = list(tokens)
    scalar = [i for i, token in enumerate(found) if token not in "[]{},:"]
    values = [i for i in scalar if found[i + 1] != ":"]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, kind = rng.choice(values) % len(found), rng.randrange(12)
        if kind < 4:
            found[at] = rng.choice(VALUES)
        elif kind < 6:
            found[at] = rng.choice(scalars)
        elif kind < 8:
            found[at] = str(rng.randrange(2 ** rng.choice((1, 3, 8, 64))))
        elif kind == 8:
            found[rng.choice(scalar) % len(found)] = rng.choice(scalars)
        elif kind == 9:
            at = rng.choice(scalar) % len(found)
            found[at:at] = found[at : at + rng.choice((2, 4, 8))]  # "a": 1, twice
        elif kind == 10:
            del found[at - 1 : at + rng.choice((1, 2, 4))]  # with its comma, at times
        else:
            found[at] = rng.choice(BROKEN)
    return " ".join(found).encode()


def damaged_json(rng: random.Random, text: str, scalars: Sequence[str]) -> bytes:
    """Damage a JSON text: a quarter as bytes, the rest as tokens, some by size."""
    if rng.randrange(4) == 0:
        return damaged_bytes(rng, text.encode())
    tokens = TOKEN.findall(text)
    if rng.randrange(ONE_IN_LARGE) == 0:
        values = [i for i, t in enumerate(tokens) if t not in "[]{},:"]
        tokens[rng.choice(values)] = rng.choice(LARGE)
        return " ".join(tokens).encode()
    return damaged_tokens(rng, tokens, scalars)


def odd_value(rng: random.Random) -> Any:
    """Return a value that a checkpoint may hold, and hardly where it stands."""
    choices: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice((None, True, False, 0, 1, -1, -7, 5, 99, 10**9)),
        lambda: rng.choice((2**31, 2**62, 2**63, 10**30, -(10**30))),
        lambda: rng.choice((0.5, float("nan"), float("inf"), -1e308)),
        lambda: rng.choice(("", "x", "\x1b[2J", "\x00", "float32", "step", "x" * 9999)),
        lambda: rng.choice((b"", b"x", b"\xff" * 64, bytes(1000))),
        lambda: rng.choice(([], {}, (), [[]], {"a": 1}, [1, 2, 3], {1: 2}, {"": {}})),
        lambda: torch.zeros(rng.choice(((), (0,), (1,), (3, 2), (2, 3)))),
        lambda: torch.full((3,), float("nan")),
        lambda: torch.arange(4),
        lambda: torch.zeros(1).expand(2**40),
        lambda: torch.zeros(2, 3, dtype=torch.bfloat16),
        lambda: torch.zeros(2, dtype=torch.complex64),
        lambda: torch.eye(2).to_sparse(),
        lambda: {"__tensor__": rng.choice((0, 99, -1, "0", 2**70, None))},
    )
    return rng.choice(choices)()


def damaged_tree(rng: random.Random, tree: Any) -> Any:
    """Return a copy in which one value is another, or gone, or one too many."""
    inner = isinstance(tree, (dict, list, tuple)) and len(tree) > 0
    if not inner or rng.randrange(6) == 0:
        return odd_value(rng)
    if isinstance(tree, dict):
        found = dict(tree)
        key = rng.choice(list(found))
        kind = rng.randrange(8)
        if kind == 0:
            del found[key]
        elif kind == 1:
            found[rng.choice(("", "x", 0, "step", "\x1b[2J"))] = odd_value(rng)
        else:
            found[key] = damaged_tree(rng, found[key])
        return found
    items = list(tree)
    at = rng.randrange(len(items))
    kind = rng.randrange(8)
    if kind == 0:
        del items[at]
    elif kind == 1:
        items.insert(at, odd_value(rng))
    else:
        items[at] = damaged_tree(rng, items[at])
    return type(tree)(items)


def tensor_file(content: Any) -> bytes:
    """Return a file of tensors with right checksums."""
    set_crc32_options(True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def damaged_archive(rng: random.Random, data: bytes) -> bytes:
    """Write a file of tensors anew, with right checksums and something wrong in it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.filelist]
    at = rng.randrange(len(entries))
    name, content = entries[at]
    method = zipfile.ZIP_STORED
    kind = rng.randrange(9)
    if kind == 0:
        entries[at] = (name, damaged_bytes(rng, content))
    elif kind == 1:
        entries[at] = (name, content[: rng.randrange(len(content) + 1)])
    elif kind == 2:
        entries[at] = (name, content + bytes(rng.choice((1, 64, 10**6))))
    elif kind == 3:
        names = ("a/", "../x", "/etc/x", "a/" * 200, "archive/data.pkl", "\x1b[2J")
        entries[at] = (rng.choice(names), content)
    elif kind == 4:
        entries.insert(at, entries[at])
    elif kind == 5:
        del entries[at]
    elif kind == 6:
        pickles = [i for i, entry in enumerate(entries) if entry[0].endswith(".pkl")]
        at = rng.choice(pickles)
        other = rng.choice((*_PICKLES, damaged_bytes(rng, entries[at][1])))
        entries[at] = (entries[at][0], other)
    elif kind == 7:
        method = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    else:
        method, size = zipfile.ZIP_DEFLATED, rng.choice((10**6, 10**8))
        entries.append((f"{name.partition('/')[0]}/data/99", bytes(size)))
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", method) as archive:
        warnings.simplefilter("ignore")  # of two entries of one name
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=method)
    return target.getvalue()
