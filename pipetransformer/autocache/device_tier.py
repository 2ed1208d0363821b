"""Copies of records in the memory of the device that uses them, within a bound."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer.autocache.ragged import Ragged, dims_of, flags, moved
from pipetransformer.autocache.records import Records

_LOG = logging.getLogger(__name__)

_LONGER = 1.25
"""Rows may be that many times as long, in the mean, as those of the first batch."""


@dataclasses.dataclass(frozen=True)
class Version:
    """What all copies have in common.

    Attributes:
        fingerprint: Of the frozen layers, and of what their values depend on.
        codec: Which records are found.
        clears: How often all records had been dropped before they were read.
    """

    fingerprint: int
    codec: str
    clears: int = 0


@dataclasses.dataclass(eq=False)
class _Buffers:
    """Memory for copies of one layout; what is in place 0 fills up short rows.

    Attributes:
        tensors: ``(places, ...)`` each: a place is a record, or with `padded` one
            position of a record.
        padded: Which hold positions.
        used: Places taken, of those that hold records and of those that hold positions.
    """

    tensors: list[Tensor]
    padded: list[bool]
    used: tuple[int, int] = (1, 1)

    def fit(self, lengths: Tensor) -> int:
        """Return for how many of the next rows there is room."""
        records, positions = self.used
        room = len(lengths)
        for tensor, padded in zip(self.tensors, self.padded, strict=True):
            if padded:
                ends = positions + lengths.cumsum(0)
                room = min(room, int((ends <= len(tensor)).sum()))
            else:
                room = min(room, len(tensor) - records)
        return room

    def accept(self, tensors: Sequence[Tensor], padded: Sequence[bool]) -> bool:
        """Tell whether rows are of the layout."""
        return self.padded == list(padded) and all(
            mine.dtype == other.dtype and mine.shape[1:] == other.shape[1 + skip :]
            for mine, other, skip in zip(self.tensors, tensors, padded, strict=True)
        )


class DeviceTier:
    """Copies of records of the host's slab, by id.

    Static: the first copies stay, as long as all of them are of one version. They are
    made as records are read, so each sample comes from the host once; the record
    there stays, for other replicas and for after a change of plan. They have no
    checksum: they are memory of this process alone.

    Args:
        device: Where they are; its current stream orders what is done with them.
        budget_bytes: Of all of them, at least 1.
        num_records: Ids run from 0 to `num_records` - 1.
        expected: Records that are asked for here, at most `num_records`: memory is
            taken for them, or as much as the budget lets.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        num_records: int,
        expected: int,
    ) -> None:
        self.device = device
        self._budget_bytes = budget_bytes
        self._expected = max(1, min(expected, num_records))
        self._version: Version | None = None
        self._buffers: _Buffers | None = None
        self._off = False
        self._record = torch.zeros(num_records, dtype=torch.int64)  # 0: no copy
        self._position = torch.zeros(num_records, dtype=torch.int64)
        self._length = torch.zeros(num_records, dtype=torch.int64)
        self._hash = torch.zeros(num_records, dtype=torch.int64)
        self._lossy = torch.zeros(num_records, dtype=torch.bool)

    @property
    def bytes(self) -> int:
        """Memory that is taken."""
        if self._buffers is None:
            return 0
        return sum(tensor.nbytes for tensor in self._buffers.tensors)

    def clear(self) -> None:
        """Drop all copies, and their memory."""
        self._buffers = None
        self._record.zero_()

    def holds(self, ids: Tensor) -> Tensor:
        """Tell of which records there are copies, of whatever version."""
        return self._record[ids] > 0

    def find(
        self,
        version: Version,
        boundary: int,
        ids: Tensor,
        hashes: Tensor,
        ragged: Ragged | None,
        length: int | None,
    ) -> Records | None:
        """Return the copies of a batch, on the device, or None.

        Args:
            version: Copies of another one are dropped.
            boundary: That the copies are of.
            ids: Of records, ``(rows,)`` int64.
            hashes: Of the inputs, ``(rows,)`` int64; others are not found.
            ragged: How rows are padded, as in `keep`.
            length: What they are padded to; longer ones are not found.
        """
        if version != self._version:
            self.clear()
            self._version = version
        held = self._buffers
        if held is None:
            return None
        there = self.holds(ids) & (self._hash[ids] == hashes)
        if any(held.padded):
            if length is None:
                return None
            there &= self._length[ids] <= length
        rows = there.nonzero().squeeze(1)
        if len(rows) == 0:
            return None
        found = ids[rows]
        lengths = self._length[found] if any(held.padded) else None
        at = {False: self._record[found].to(self.device)}
        if lengths is not None and length is not None:
            steps = torch.arange(length)
            places = self._position[found].unsqueeze(1) + steps
            places[steps >= lengths.unsqueeze(1)] = 0
            at[True] = places.reshape(-1).to(self.device)
        tensors = []
        for buffer, padded in zip(held.tensors, held.padded, strict=True):
            taken = buffer.index_select(0, at[padded])
            tensors.append(
                taken.view(len(rows), -1, *taken.shape[1:]) if padded else taken
            )
        if ragged is not None and lengths is not None:
            tensors = moved(tensors, dims_of(tensors, ragged.dim), back=True)
        lossy = bool(self._lossy[found].any())
        return Records(boundary, rows, tuple(tensors), lengths, lossy)

    def keep(
        self, ids: Tensor, hashes: Tensor, records: Records, ragged: Ragged | None
    ) -> Records:
        """Bring records of the version asked for last here, and keep copies.

        What there are copies of, or has no room, is brought here only.

        Args:
            ids: Of a batch's records, ``(rows,)`` int64.
            hashes: Of its inputs, ``(rows,)`` int64.
            records: Of some rows of the batch, wherever they are.
            ragged: How they are padded; None: they are not.

        Returns:
            The records on the device.
        """
        records = records.to(self.device)
        tensors, lengths = list(records.tensors), records.lengths
        padded, fills = [False] * len(tensors), [0.0] * len(tensors)
        if ragged is not None and lengths is not None:
            dims = dims_of(tensors, ragged.dim)
            tensors, padded = moved(tensors, dims), flags(dims)
            last = len(ragged.fills) - 1
            fills = [ragged.fills[min(n, last)] for n in range(len(tensors))]
        if not self._off:
            self._keep(
                ids[records.rows],
                hashes[records.rows],
                tensors,
                padded,
                fills,
                torch.zeros_like(records.rows) if lengths is None else lengths,
                lossy=records.lossy,
            )
        return records

    def _keep(
        self,
        ids: Tensor,
        hashes: Tensor,
        tensors: Sequence[Tensor],
        padded: Sequence[bool],
        fills: Sequence[float],
        lengths: Tensor,
        *,
        lossy: bool,
    ) -> None:
        """Copy rows, whose padded dims are dim 1, as far as there is room."""
        if self._buffers is None:
            self._buffers = self._allocate(tensors, padded, fills, lengths)
        held = self._buffers
        if held is None or not held.accept(tensors, padded):
            return
        rows = _first_of_each(ids)
        rows = rows[~self.holds(ids[rows])]
        rows = rows[: held.fit(lengths[rows])]
        if len(rows) == 0:
            return
        new, sizes = ids[rows], lengths[rows]
        records, positions = held.used
        ends = positions + sizes.cumsum(0)
        taken = {False: rows.to(self.device)}
        if any(padded):
            size = tensors[list(padded).index(True)].shape[1]  # of all of them
            steps = torch.arange(size)
            flat = rows.unsqueeze(1) * size + steps
            taken[True] = flat[steps < sizes.unsqueeze(1)].to(self.device)
        for buffer, tensor, is_padded in zip(
            held.tensors, tensors, padded, strict=True
        ):
            source = tensor.flatten(0, 1) if is_padded else tensor
            begin = positions if is_padded else records
            count = len(taken[is_padded])
            buffer[begin : begin + count].copy_(
                source.index_select(0, taken[is_padded])
            )
        self._record[new] = torch.arange(records, records + len(rows))
        self._position[new] = ends - sizes
        self._length[new] = sizes
        self._hash[new] = hashes[rows]
        self._lossy[new] = lossy
        held.used = (records + len(rows), positions + int(sizes.sum()))

    def _allocate(
        self,
        tensors: Sequence[Tensor],
        padded: Sequence[bool],
        fills: Sequence[float],
        lengths: Tensor,
    ) -> _Buffers | None:
        longest = _LONGER * float(lengths.double().mean())
        sizes = [
            tensor[:0].element_size() * tensor.shape[1 + is_padded :].numel()
            for tensor, is_padded in zip(tensors, padded, strict=True)
        ]
        each = sum(
            size * (longest if is_padded else 1)
            for size, is_padded in zip(sizes, padded, strict=True)
        )
        most = self._budget_bytes - sum(sizes)  # places 0
        records = min(self._expected, int(most / max(each, 1)))
        if records < 1:
            return None
        buffers = []
        try:
            for tensor, is_padded, fill in zip(tensors, padded, fills, strict=True):
                places = 1 + (int(records * longest) if is_padded else records)
                shape = (places, *tensor.shape[1 + is_padded :])
                buffers.append(tensor.new_empty(shape))
                buffers[-1][:1].fill_(fill)
        except torch.OutOfMemoryError as error:
            self._off = True
            _LOG.warning("cache: no copies of records on %s: %s", self.device, error)
            return None
        return _Buffers(buffers, list(padded))


def _first_of_each(ids: Tensor) -> Tensor:
    """Return the positions of the first of equal ids, ascending."""
    kinds, which = torch.unique(ids, return_inverse=True)
    if len(kinds) == len(ids):
        return torch.arange(len(ids))
    first = torch.full((len(kinds),), len(ids))
    first.scatter_reduce_(0, which, torch.arange(len(ids)), "amin")
    return first.sort().values
