"""What is found of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Records:
    """Cached activations of some rows of a batch, all at one boundary.

    Attributes:
        boundary: number of layers that the activations have passed.
        rows: positions in the batch, ``(n,)`` int64, ascending.
        tensors: what crosses the boundary, each ``(n, ...)``, on the device asked for;
            after `ActivationCache.use_device` those at the boundary on that one.
        lengths: valid positions of each row, ``(n,)`` int64; None: not ragged.
        lossy: some of them went through a codec that rounds.
    """

    boundary: int
    rows: Tensor
    tensors: tuple[Tensor, ...]
    lengths: Tensor | None = None
    lossy: bool = False

    def to(self, device: torch.device) -> Records:
        """Return the same with the tensors on a device."""
        return replace(self, tensors=tuple(t.to(device) for t in self.tensors))


def joined(found: list[Records], other: Records) -> list[Records]:
    """Add an entry; rows of the same boundary and layout become one."""
    for number, each in enumerate(found):
        if each.boundary == other.boundary and _is_like(each, other):
            return [*found[:number], _merged(each, other), *found[number + 1 :]]
    return [*found, other]


def _is_like(one: Records, other: Records) -> bool:
    return (
        len(one.tensors) == len(other.tensors)
        and (one.lengths is None) == (other.lengths is None)
        and all(
            mine.dtype == theirs.dtype and mine.shape[1:] == theirs.shape[1:]
            for mine, theirs in zip(one.tensors, other.tensors, strict=True)
        )
    )


def _merged(one: Records, other: Records) -> Records:
    rows, order = torch.cat([one.rows, other.rows]).sort()
    lengths = None
    if one.lengths is not None and other.lengths is not None:
        lengths = torch.cat([one.lengths, other.lengths])[order]
    place = order.argsort()
    here, there = place[: len(one.rows)], place[len(one.rows) :]
    tensors = []
    for mine, theirs in zip(one.tensors, other.tensors, strict=True):
        whole = mine.new_empty((len(rows), *mine.shape[1:]))
        whole.index_copy_(0, here.to(mine.device), mine)
        whole.index_copy_(0, there.to(mine.device), theirs)
        tensors.append(whole)
    lossy = one.lossy or other.lossy
    return Records(one.boundary, rows, tuple(tensors), lengths, lossy)
