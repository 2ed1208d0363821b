"""Mutated profiles, clusters and plans: a valid object or a ValueError, nothing else.

100,000 inputs through the parser of the commands, from fixed seeds. A quarter is
mutated as bytes, the rest as JSON tokens: most stay JSON and meet the fields' rules.
"""

import random
import sys
from pathlib import Path

import pytest

from pipetransformer.cli import files
from pipetransformer.planner import search
from tests.planner.documents import FORMATS, text

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from _damage import TOKEN, damaged_bytes, damaged_tokens

NUM_INPUTS = {"profile": 40_000, "cluster": 40_000, "plan": 20_000}


def inputs(name):
    """Yield the mutated inputs of a format."""
    rng = random.Random(f"mutated {name}")
    tokens = {key: TOKEN.findall(text(value[1])) for key, value in FORMATS.items()}
    scalars = [t for each in tokens.values() for t in each if t not in "[]{},:"]
    whole = text(FORMATS[name][1]).encode()
    for _ in range(NUM_INPUTS[name] // 4):
        yield damaged_bytes(rng, whole)
        for _ in range(3):
            yield damaged_tokens(rng, tokens[name], scalars)


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
            plan = search(
                *read,
                global_batch=batch,
                boundary=boundary,
                prefix_placements=rng.choice(
                    (("filled",), ("replicated", "pipelined"))
                ),
            )
        except ValueError as error:
            num_refused += 1
            assert "expected" in str(error)
        else:
            num_planned += 1
            assert plan.simulated_step_ns >= plan.lower_bound_ns
    assert num_planned > 100 and num_refused > 100
