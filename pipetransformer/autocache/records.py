"""What is found of a batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipetransformer import _C


@dataclass(frozen=True, eq=False)
class Records:
    """Cached activations of some rows of a batch, all at one boundary.

    Attributes:
        boundary: number of layers that the activations have passed.
        rows: positions in the batch, ``(n,)`` int64, ascending.
        tensors: what crosses the boundary, each ``(n, ...)``, on the device asked for;
            after `ActivationCache.use_device` those at the boundary on that one.
        lengths: valid positions of each row, ``(n,)`` int64, of rows with several
            lengths ``(n, lengths)``; None: not ragged.
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


def unfit(tensors: Sequence[Tensor]) -> str | None:
    """Say why no record can hold a row of each of these; None: one can.

    Args:
        tensors: What crosses the boundary, each ``(rows, ...)``.
    """
    most, dims = _C.autocache.MAX_TENSORS, _C.autocache.MAX_DIMS
    if len(tensors) > most:
        return (
            f"expected at most {most} tensors, as many as a record holds, got "
            f"{len(tensors)}"
        )
    for number, tensor in enumerate(tensors):
        if tensor.dim() - 1 > dims:
            return (
                f"tensor {number}: expected at most {dims} dims in a row, as many as a "
                f"record holds, got {tensor.dim() - 1}"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            return f"tensor {number}: expected a plain dense tensor, got a {kind} one"
    return None


def joined(found: Iterable[Records]) -> list[Records]:
    """Return the entries, those of one boundary and layout as one."""
    groups: dict[Hashable, list[Records]] = {}
    for each in found:
        groups.setdefault((each.boundary, _layout(each)), []).append(each)
    return [_merged(group) for group in groups.values()]


def _layout(records: Records) -> Hashable:
    shapes = tuple((tensor.dtype, tensor.shape[1:]) for tensor in records.tensors)
    return shapes, records.lengths is None


def _merged(parts: Sequence[Records]) -> Records:
    first = parts[0]
    if len(parts) == 1:
        return first
    rows, order = torch.cat([part.rows for part in parts]).sort()
    lengths = [part.lengths for part in parts if part.lengths is not None]
    places = torch.split(order.argsort(), [len(part.rows) for part in parts])
    tensors = []
    for column in zip(*(part.tensors for part in parts), strict=True):
        whole = column[0].new_empty((len(rows), *column[0].shape[1:]))
        for place, tensor in zip(places, column, strict=True):
            whole.index_copy_(0, place.to(whole.device), tensor)
        tensors.append(whole)
    return Records(
        first.boundary,
        rows,
        tuple(tensors),
        torch.cat(lengths)[order] if lengths else None,
        any(part.lossy for part in parts),
    )
