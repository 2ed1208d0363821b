"""Rows of layers to cut: seeded generators, and models whose units are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Units in parameters: embedding; attention and MLP of each block; tail.
# Source: PipeTransformer (ICML 2021), its models.
VIT_B = [742_656, *[2_363_904, 4_723_968] * 12, 1_536, 769_000]
BERT_BASE = [23_837_184, *[2_363_904, 4_723_968] * 12, 590_592, 1_538]
BERT_LARGE = [31_782_912, *[4_200_448, 8_395_776] * 24, 2_050]
STAGES = (2, 4, 8, 16)


@dataclass(frozen=True)
class LayerRow:
    """Layers to cut into stages.

    Attributes:
        kind: Name of the generator.
        times: Of each layer, ns, n entries; not all are 0.
        parameters: Of each layer, n entries.
        copies: n + 1 entries, ns; a stage pays for both of its ends.
        num_stages: How many stages to cut it into, at most n.
    """

    kind: str
    times: Sequence[int]
    parameters: Sequence[int]
    copies: Sequence[int]
    num_stages: int

    def largest_stage(self, cuts: Sequence[int]) -> int:
        """Return the time of the slowest stage, ns; stages may be empty."""
        return max(
            sum(self.times[begin:end]) + self.copies[begin] + self.copies[end]
            for begin, end in pairwise(cuts)
        )


Times = Callable[[random.Random, int], list[int]]


def _uniform(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(1, 1_000_000) for _ in range(n)]


def _lognormal(rng: random.Random, n: int) -> list[int]:
    return [1 + int(rng.lognormvariate(12, 1.2)) for _ in range(n)]


def _near(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(95_000, 105_000) for _ in range(n)]


def _embedding_heavy(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(200_000, 1_000_000), *_near(rng, n - 1)]


def _last_heavy(rng: random.Random, n: int) -> list[int]:
    return _embedding_heavy(rng, n)[::-1]


def _zero_layers(rng: random.Random, n: int) -> list[int]:
    times = [rng.choice([0, 0, *_near(rng, 1)]) for _ in range(n)]
    times[rng.randrange(n)] = 100_000
    return times


def _outlier(rng: random.Random, n: int) -> list[int]:
    times = _near(rng, n)
    times[rng.randrange(n)] *= rng.randint(5, 40)
    return times


def _frozen_prefix(rng: random.Random, n: int) -> list[int]:
    """Blocks in halves; the first active one drops an input gradient."""
    attention, mlp = rng.randint(80_000, 120_000), rng.randint(150_000, 250_000)
    times = [(attention, mlp)[i % 2] for i in range(n)]
    times[0] = times[0] * 2 // 3
    return times


def _peft(rng: random.Random, n: int) -> list[int]:
    """No weight gradients but those of small adapters behind each layer."""
    layer, adapter = rng.randint(80_000, 120_000), rng.randint(2_000, 12_000)
    return [(layer, adapter)[i % 2] for i in range(n)]


TIMES: dict[str, Times] = {
    "uniform": _uniform,
    "lognormal": _lognormal,
    "embedding-heavy": _embedding_heavy,
    "last-heavy": _last_heavy,
    "zero layers": _zero_layers,
    "outlier": _outlier,
    "frozen prefix": _frozen_prefix,
    "PEFT": _peft,
    "skips": _near,
}


def random_row(kind: str, seed: int, *, num_layers: int | None = None) -> LayerRow:
    """Make a row of up to 64 layers; equal arguments give equal rows.

    Args:
        kind: A key of ``TIMES``.
        seed: Decides everything else.
        num_layers: In place of a random number.
    """
    rng = random.Random(f"{kind} {seed}")
    n = num_layers or rng.randint(4, 64)
    times = TIMES[kind](rng, n)
    copies = [0] * (n + 1)
    if kind == "skips":
        copies[1:n] = (rng.randint(1_000, 20_000) for _ in range(n - 1))
        for _ in range(n // 6):
            begin, end = sorted(rng.sample(range(1, n), 2))
            for j in range(begin, end):
                copies[j] += 15_000  # a skip passes here
    return LayerRow(
        kind,
        times,
        [int(time * rng.uniform(5, 60)) for time in times],
        copies,
        rng.randint(2, min(16, n)),
    )


def model_rows() -> list[LayerRow]:
    """Return the known models, unfrozen and with frozen blocks, for every K."""
    rows = []
    for name, sizes, tokens, width in (
        ("ViT-B/16", VIT_B, 197, 768),
        ("BERT-base", BERT_BASE, 512, 768),
        ("BERT-large", BERT_LARGE, 384, 1024),
    ):
        times = unit_times(sizes, tokens, width)
        num_blocks = len(sizes) // 2 - 1
        for frozen in (0, num_blocks // 3, num_blocks // 2):
            first = 1 + 2 * frozen if frozen else 0
            active = list(sizes[first:])
            for num_stages in STAGES:
                if num_stages <= len(active):
                    kind = f"{name}, {frozen} frozen"
                    copies = [0] * (len(active) + 1)
                    row = LayerRow(kind, times[first:], active, copies, num_stages)
                    rows.append(row)
    return rows


def unit_times(sizes: Sequence[int], tokens: int, width: int) -> list[int]:
    """Return each unit's forward and backward time for one sample, ns at 1 TFLOP/s.

    A unit multiplies each token with its parameters; attention adds its scores and
    their products. The embedding is no multiplication and costs a pass over its
    output, and so does what has less than one parameter per output feature and
    token; a classifier at the end sees one token.

    Args:
        sizes: Parameters of the units: embedding, attention and MLP in turn, tail.
        tokens: Length of the sequence.
        width: Features of a token.
    """
    passed = 10 * tokens * width
    times = []
    for i, size in enumerate(sizes):
        is_attention = size == sizes[1] and i % 2 == 1
        is_block = size in (sizes[1], sizes[2])
        operations = passed
        if is_block:
            scores = 4 * tokens**2 * width if is_attention else 0
            operations = 2 * tokens * size + scores
        elif i > 0 and size > 2 * width:
            operations = 2 * size
        times.append(3 * operations // 1000)
    return times
