"""Inputs to measure a model with: rows of batches as training will see them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipetransformer.data.loading import Collate, MapDataset, samples_of
from pipetransformer.data.sampler import ElasticSampler
from pipetransformer.data.structures import rows_of, slice_rows, tensors_of

_BATCHES = 5
"""How many batches are compared where samples differ in shape."""


def typical_rows(
    dataset: MapDataset,
    sampler: ElasticSampler,
    rows: int,
    *,
    collate: Collate,
    inputs_of: Callable[[object], Any],
) -> Any:
    """Return inputs of `rows` rows, as large as those of a batch of median size.

    Where samples have one shape, so many of the first batch are enough, and no other is
    loaded. Where they differ, as texts do, whole batches are collated, since padding is
    that of a batch, and the rows are of the one with the median number of elements.

    Args:
        dataset: Map-style.
        sampler: Names the batches, whole ones.
        rows: How many; rows are repeated where a batch has fewer.
        collate: A list of samples to a batch.
        inputs_of: The inputs of a collated batch.
    """
    lists = list(itertools.islice(sampler, _BATCHES))
    first = samples_of(dataset, lists[0][: max(rows, 2)])
    if len(first) > 1 and len({_extent(sample) for sample in first}) == 1:
        return inputs_of(collate([first[n % len(first)] for n in range(rows)]))
    found = []
    for ids in lists:
        inputs = inputs_of(collate(samples_of(dataset, ids)))
        found.append((sum(t.numel() for t in tensors_of(inputs)), inputs))
    found.sort(key=lambda pair: pair[0])
    inputs = found[(len(found) - 1) // 2][1]
    return slice_rows(inputs, torch.arange(rows) % max(1, rows_of(inputs)))


def _extent(sample: object) -> object:
    """Return what of a sample's shape may differ from that of another."""
    if isinstance(sample, Mapping):
        return tuple((name, _extent(part)) for name, part in sample.items())
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, (tuple, list)):
        # Numbers, such as those of tokens, have no shapes of their own.
        if sample and isinstance(sample[0], (int, float)):
            return len(sample)
        return tuple(_extent(part) for part in sample)
    return tuple(getattr(sample, "shape", ()))
