"""A frozen prefix over a cache, and how far its hits are from recomputation.

A case says what varies; ``CASES`` has all combinations, of storages other than host
memory those of two dtypes. The prefix has four small
layers, each attention where a mask says what is valid, and a feed-forward part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.autocache import ActivationCache, Codec, Ragged, record_bytes
from pipetransformer.pipe import Workers
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock

SAMPLES, LENGTH, WIDTH, LAYERS = 24, 12, 16, 4
BATCH, OTHER_BATCH = 8, 5
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
# What another shape of a batch may make of rounding, over the largest value.
ROUNDING = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 2**-8,
    torch.bfloat16: 2**-5,
}
ONE, PAIR = "one tensor", "tuple with mask"
FIXED, RAGGED = "fixed", "ragged"
Batches = Sequence[Tensor]


@dataclasses.dataclass(frozen=True)
class Storage:
    """How records are kept.

    Attributes:
        codec: What they are kept in.
        on_disk: Memory holds a part of them, and the disk the others.
        on_device: There are copies of some of them, as on a device; of the host here.
        error: By dtype, how far what is read may be from what was stored, over the
            largest value, with what later layers make of it; none: the same bits.
    """

    codec: Codec = "native"
    on_disk: bool = False
    on_device: bool = False
    error: Mapping[torch.dtype, float] = dataclasses.field(default_factory=dict)


STORAGES = {
    "host": Storage(),
    "host, bf16": Storage("bf16", error={torch.float32: 2**-7}),
    "host, fp16": Storage("fp16", error={torch.float32: 2**-10}),
    "host, int8": Storage(
        "int8",
        error={torch.float32: 2**-6, torch.float16: 2**-6, torch.bfloat16: 2**-5},
    ),
    "device": Storage(on_device=True),
    "device, int8": Storage(
        "int8",
        on_device=True,
        error={torch.float32: 2**-6, torch.float16: 2**-6, torch.bfloat16: 2**-5},
    ),
    "disk": Storage(on_disk=True),
    "disk, int8": Storage(
        "int8",
        on_disk=True,
        error={torch.float32: 2**-6, torch.float16: 2**-6, torch.bfloat16: 2**-5},
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What varies.

    Attributes:
        boundary: Frozen layers.
        form: What crosses the boundary: `ONE` tensor, or a hidden state and a mask.
        dtype: A key of `DTYPES`.
        rows: `FIXED` or `RAGGED`, padded to the longest of each batch.
        storage: A key of `STORAGES`.
    """

    boundary: int
    form: str = ONE
    dtype: str = "fp32"
    rows: str = FIXED
    storage: str = "host"

    def __str__(self) -> str:
        """Return all in one line, which names a row of a table."""
        parts = (self.form, self.dtype, self.rows, self.storage)
        return f"boundary {self.boundary}, {', '.join(parts)}"

    def bound(self, *, same_shape: bool) -> float:
        """Return the largest difference there may be, over the largest value."""
        dtype = DTYPES[self.dtype]
        stored = STORAGES[self.storage].error.get(dtype, 0.0)
        return stored + (0.0 if same_shape else ROUNDING[dtype])


CASES = [
    Case(*parts)
    for parts in itertools.product(
        range(1, LAYERS + 1), (ONE, PAIR), DTYPES, (FIXED, RAGGED), STORAGES
    )
    if parts[4] == "host" or parts[2] in ("fp32", "bf16")
]


class Layer(nn.Module):
    """Attention within a row over what its mask leaves, if any; feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        """Map ``(rows, length, WIDTH)``; the mask, added to scores, goes along."""
        if mask is not None:
            query, key, value = self.mixed(self.norm(hidden)).chunk(3, -1)
            scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
            hidden = hidden + (scores + mask[:, None]).softmax(-1) @ value
        inner = torch.tanh(self.up(self.norm(hidden)))
        hidden = hidden + self.down(inner)
        return hidden if mask is None else (hidden, mask)


class Subject:
    """The layers, samples and caches of one case.

    Args:
        case: What varies.
        seed: Of weights, samples and batches.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._drawn = torch.Generator().manual_seed(seed)
        dtype = DTYPES[case.dtype]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [Layer() for _ in range(LAYERS)]
        self._layers = [layer.to(dtype).eval() for layer in layers]
        shape = (SAMPLES, LENGTH, WIDTH)
        self._hidden = torch.rand(shape, generator=self._drawn) + 0.1
        self._lengths = torch.full((SAMPLES,), LENGTH)
        if case.rows == RAGGED:
            self._lengths = torch.randint(
                1, LENGTH + 1, (SAMPLES,), generator=self._drawn
            )
        valid = torch.arange(LENGTH) < self._lengths[:, None]
        self._hidden = (self._hidden * valid[..., None]).to(dtype)
        self._mask = torch.zeros(SAMPLES, LENGTH).masked_fill(~valid, -math.inf)
        self._mask = self._mask.to(dtype)
        self._ragged = self._spec() if case.rows == RAGGED else None
        self._workers = Workers(1)

    def _spec(self) -> Ragged:
        if self.case.form == ONE:
            return Ragged(lambda inputs: (inputs[..., 0] != 0).sum(1))
        return Ragged(lambda inputs: (inputs[1] == 0).sum(1), fill=(0.0, -math.inf))

    def batches(self, rows: int) -> list[Tensor]:
        """Return the ids of all samples in random order, cut into batches."""
        order = torch.randperm(SAMPLES, generator=self._drawn)
        return list(torch.split(order, rows))

    def cache(self) -> ActivationCache:
        """Return an empty cache of the case's kind; every hit is audited."""
        bytes_of_one = record_bytes([self._hidden[:1], self._mask[:1]])
        storage = STORAGES[self.case.storage]
        held = SAMPLES // 6 if storage.on_disk else 2 * SAMPLES
        cache = ActivationCache.create(
            run_id="exactness",
            num_samples=SAMPLES,
            slot_bytes=bytes_of_one,
            budget_bytes=held * (bytes_of_one + 64) + 5120,
            ragged=self._ragged is not None or storage.codec != "native",
            verify="all",
            audit_every=1,
        )
        if storage.on_disk:
            cache.add_disk(tempfile.gettempdir(), patience_s=60.0)
        if storage.on_device:
            whole = self._hidden.nbytes + self._mask.nbytes
            cache.use_device(torch.device("cpu"), whole // 2)
        return cache

    def values(
        self, boundary: int, batches: Batches, cache: ActivationCache | None
    ) -> list[list[Tensor]]:
        """Return what the prefix gives of each batch, valid positions alone."""
        prefix = FrozenPrefix(
            self._layers,
            boundary,
            self._workers,
            Clock(),
            seed=0,
            ragged=self._ragged,
        )
        position = DrawPosition(0, 0)
        found = []
        for ids in batches:
            value = prefix(
                self._inputs_of(ids),
                ids,
                cache,
                position=position,
                codec=STORAGES[self.case.storage].codec,
            )
            found.append(self._valid(value, ids))
        return found

    def store(self, boundary: int, batches: Batches, cache: ActivationCache) -> None:
        """Fill a cache; copies on a device are made when records are read."""
        for _ in range(2 if STORAGES[self.case.storage].on_device else 1):
            self.values(boundary, batches, cache)

    def _inputs_of(self, ids: Tensor) -> Callable[[], Any]:
        longest = int(self._lengths[ids].max())
        hidden, mask = self._hidden[ids, :longest], self._mask[ids, :longest]
        return lambda: hidden if self.case.form == ONE else (hidden, mask)

    def _valid(self, value: Any, ids: Tensor) -> list[Tensor]:
        tensors = (value,) if isinstance(value, Tensor) else value
        longest = tensors[0].shape[1]
        valid = torch.arange(longest) < self._lengths[ids][:, None]
        return [tensor[valid] for tensor in tensors]


@dataclasses.dataclass(frozen=True)
class Measured:
    """How far the cache is from recomputation.

    Attributes:
        difference: The largest of all values, over the largest of their batch.
        same_bits: All values have the bits of recomputation.
        hits: Rows that were found.
        stale: Rows that were found, and not valid.
        disk_hits: Of the hits, those that were on disk.
        device_hits: Of the hits, those that were on the device.
    """

    difference: float
    same_bits: bool
    hits: int
    stale: int
    disk_hits: int
    device_hits: int


def hits_of_the_same_batches(subject: Subject) -> Measured:
    """Each batch is found whole, as it was stored."""
    batches = subject.batches(BATCH)
    cache = subject.cache()
    subject.store(subject.case.boundary, batches, cache)
    return _against_recomputation(subject, batches, cache)


def hits_of_other_batches(subject: Subject) -> Measured:
    """Each batch is put together from what others have stored."""
    cache = subject.cache()
    subject.store(subject.case.boundary, subject.batches(BATCH), cache)
    return _against_recomputation(subject, subject.batches(OTHER_BATCH), cache)


def advanced(subject: Subject, below: int) -> Measured:
    """What is found at a boundary `below` goes through the layers that lie between."""
    batches = subject.batches(BATCH)
    cache = subject.cache()
    subject.store(below, batches, cache)
    return _against_recomputation(subject, batches, cache)


def partly_advanced(subject: Subject, below: int) -> Measured:
    """A batch mixes records of both boundaries and samples that have none."""
    cache = subject.cache()
    batches = subject.batches(BATCH)
    subject.store(below, batches[:2], cache)
    subject.store(subject.case.boundary, batches[1:2], cache)
    return _against_recomputation(subject, subject.batches(OTHER_BATCH), cache)


def unfrozen(subject: Subject, above: int) -> Measured:
    """Half of the records come from a boundary `above`, which is no longer frozen."""
    cache = subject.cache()
    batches = subject.batches(BATCH)
    subject.store(subject.case.boundary, batches, cache)
    subject.store(above, batches[:1], cache)
    return _against_recomputation(subject, batches, cache)


def _against_recomputation(
    subject: Subject, batches: Batches, cache: ActivationCache
) -> Measured:
    before = cache.counters
    found = subject.values(subject.case.boundary, batches, cache)
    now = cache.counters
    if cache.given_up is not None:
        raise RuntimeError(f"{subject.case}: {cache.given_up}")
    fresh = subject.values(subject.case.boundary, batches, None)
    cache.close()
    pairs = list(_pairs(found, fresh))
    return Measured(
        max(difference(one, other) for one, other in pairs),
        all(same_bits(one, other) for one, other in pairs),
        now.hits - before.hits,
        now.stale - before.stale,
        now.disk_hits - before.disk_hits,
        now.device_hits - before.device_hits,
    )


def _pairs(
    found: Sequence[Sequence[Tensor]], fresh: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for one, other in zip(found, fresh, strict=True):
        yield from zip(one, other, strict=True)


def difference(found: Tensor, fresh: Tensor) -> float:
    """Return the largest difference over the largest finite value of `fresh`.

    Equal infinities have none; infinite where kinds, or what is finite, differ.
    """
    if found.dtype != fresh.dtype or found.shape != fresh.shape:
        return math.inf
    one, other = found.double(), fresh.double()
    apart = (one - other).abs()[one != other]
    if not len(apart):
        return 0.0
    largest = float(other[other.isfinite()].abs().max())
    found_apart = float(apart.max()) / largest
    return found_apart if math.isfinite(found_apart) else math.inf


def same_bits(found: Tensor, fresh: Tensor) -> bool:
    """Tell whether two tensors are equal in kind and in every bit."""
    if found.dtype != fresh.dtype or found.shape != fresh.shape:
        return False
    one, other = (each.contiguous().view(torch.uint8) for each in (found, fresh))
    return torch.equal(one, other)
