"""Mutated profiles, clusters and plans: a valid object or a ValueError, nothing else.

100,000 inputs through the parser of the commands, from fixed seeds. A quarter is
mutated as bytes, the rest as JSON tokens: most stay JSON and meet the fields' rules.
"""

import random
import re

import pytest

from pipetransformer.cli import files
from pipetransformer.planner import search
from tests.planner.documents import FORMATS, text

NUM_INPUTS = {"profile": 40_000, "cluster": 40_000, "plan": 20_000}
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
MEANING = b'{}[],:"0123456789-.eE\\ntf\xff\xc3'  # bytes that JSON or UTF-8 act on
VALUES = [
    *("null", "true", "false", "[]", "{}", '""', "0", "1", "-1", "1.0", "1.5", "1e5"),
    *("1e999", "-0.0", str(2**62), str(2**62 + 1), str(2**64), "9" * 400, "2.0"),
    *('"\\ud800"', '"\\u0000"', '"\u00e9"', '"gpipe"', '"none"', '{"a": 1}'),
    *("[1, 2, 3]", "[[0, 1]]", "[" * 200 + "]" * 200, '{"a":' * 99 + "1" + "}" * 99),
]
BROKEN = [
    *("NaN", "Infinity", "-Infinity", "01", "0x1", "+1", "1_0", "9" * 5000, '"x'),
    *("[" * 200, "]" * 5, "\u0661", "\ufeff", "'a'", "// x", "undefined", "\t", '"\t"'),
]


def mutated_bytes(rng, data):
    """Change, remove, insert, repeat or move some bytes."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 64))
        kind = rng.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = rng.randbytes(length)
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            data[at : at + 1] = bytes([rng.choice(MEANING)])
        else:
            del data[at:]
    return bytes(data)


def mutated_tokens(rng, tokens, scalars):
    """Replace values and names, mostly; remove, repeat or break, sometimes."""
    tokens = list(tokens)
    scalar = [i for i, token in enumerate(tokens) if token not in "[]{},:"]
    values = [i for i in scalar if tokens[i + 1] != ":"]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, kind = rng.choice(values) % len(tokens), rng.randrange(12)
        if kind < 4:
            tokens[at] = rng.choice(VALUES)
        elif kind < 6:
            tokens[at] = rng.choice(scalars)
        elif kind < 8:
            tokens[at] = str(rng.randrange(2 ** rng.choice((1, 3, 8, 64))))
        elif kind == 8:
            tokens[rng.choice(scalar) % len(tokens)] = rng.choice(scalars)
        elif kind == 9:
            at = rng.choice(scalar) % len(tokens)
            tokens[at:at] = tokens[at : at + rng.choice((2, 4, 8))]  # "a": 1, twice
        elif kind == 10:
            del tokens[at - 1 : at + rng.choice((1, 2, 4))]  # with its comma, at times
        else:
            tokens[at] = rng.choice(BROKEN)
    return " ".join(tokens).encode()


def inputs(name):
    """Yield the mutated inputs of a format."""
    rng = random.Random(f"mutated {name}")
    tokens = {key: TOKEN.findall(text(value[1])) for key, value in FORMATS.items()}
    scalars = [t for each in tokens.values() for t in each if t not in "[]{},:"]
    whole = text(FORMATS[name][1]).encode()
    for _ in range(NUM_INPUTS[name] // 4):
        yield mutated_bytes(rng, whole)
        for _ in range(3):
            yield mutated_tokens(rng, tokens[name], scalars)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_mutated_documents_are_read_or_refused(name):
    kind = FORMATS[name][0]
    num_valid = num_json = 0
    for data in inputs(name):
        try:
            read = kind.from_json(files.decode(data))
        except ValueError as error:
            said = str(error)
            assert len(said) < 1000, data
            num_json += "expected JSON" not in said and "expected UTF-8" not in said
        else:
            num_valid += 1
            if num_valid % 8 == 0:  # what was read is whole
                assert kind.from_json(read.to_json()) == read, data
    # The mutations reach every depth: some are valid, many are JSON.
    assert num_valid > NUM_INPUTS[name] // 40
    assert num_json > NUM_INPUTS[name] // 3


EXTREMES = [0, 0, 1, 1, 2, 3, 7, 50, 1000, 10**6, 2**31, 2**40, 2**61, 2**62]


def extreme(rng, document):
    """A copy in which some numbers are small, large, or at their limits."""
    if isinstance(document, dict):
        kept = ("version", "microbatch_samples")
        return {
            key: value if key in kept else extreme(rng, value)
            for key, value in document.items()
        }
    if isinstance(document, list):
        return [extreme(rng, value) for value in document]
    is_number = isinstance(document, (int, float)) and not isinstance(document, bool)
    if is_number and rng.random() < 0.07:
        return rng.choice(EXTREMES)
    return document


def test_whatever_can_be_read_can_be_searched_or_is_refused():
    rng = random.Random("searched")
    num_planned = num_refused = 0
    profile, cluster = FORMATS["profile"], FORMATS["cluster"]
    layers = {k: v for k, v in profile[1].items() if k not in ("tied_layers", "skips")}
    for _ in range(1500):
        machines = {**cluster[1], "device_link_bytes_per_s": 10**9}
        machines["device_memory_bytes"] = rng.choice((1000, 2**40))
        try:
            read = (
                profile[0].from_json(text(extreme(rng, layers))),
                cluster[0].from_json(text(extreme(rng, machines))),
            )
        except ValueError:
            continue
        batch = rng.choice((1, 16, 64, 64, 2**20, 2**40))
        boundary = rng.choice((0, 0, 1, 2, 2, 3))
        try:
            plan = search(*read, global_batch=batch, boundary=boundary)
        except ValueError as error:
            num_refused += 1
            assert "expected" in str(error)
        else:
            num_planned += 1
            assert plan.simulated_step_ns >= plan.lower_bound_ns
    assert num_planned > 100 and num_refused > 100
