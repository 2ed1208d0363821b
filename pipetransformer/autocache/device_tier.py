"""Copies of records in the memory of the device that uses them, within a bound."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer.autocache.ragged import Ragged, dims_of, flags, moved
from pipetransformer.autocache.records import Records, joined
from pipetransformer.device import bring

_LOG = logging.getLogger(__name__)

_LONGER = 1.25
"""Rows may be that many times as long, in the mean, as those of the batch for which
memory is taken; if they are longer still, more is taken."""


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

    @property
    def bytes(self) -> int:
        """Memory that is taken."""
        return sum(tensor.nbytes for tensor in self.tensors)

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Batch:
    """Rows that were read.

    Attributes:
        tensors: ``(rows, ...)`` each, a padded dim as dim 1.
        padded: Which have one.
        fills: What stands behind a row's end, of each.
        ids: Of the records, ``(rows,)`` int64.
        hashes: Of the inputs, likewise.
        lengths: Of the rows, likewise; 0 where nothing is padded.
        lossy: Some went through a codec that rounds.
    """

    tensors: list[Tensor]
    padded: list[bool]
    fills: list[float]
    ids: Tensor
    hashes: Tensor
    lengths: Tensor
    lossy: bool


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
            taken for them, or as much as the budget lets. Where they turn out more, or
            longer than the first ones, more is taken.
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
        self._buffers: list[_Buffers] = []  # of one layout; the last one fills up
        self._off = False
        self._buffer = torch.zeros(num_records, dtype=torch.int64)  # that holds it
        self._record = torch.zeros(num_records, dtype=torch.int64)  # 0: no copy
        self._position = torch.zeros(num_records, dtype=torch.int64)
        self._length = torch.zeros(num_records, dtype=torch.int64)
        self._hash = torch.zeros(num_records, dtype=torch.int64)
        self._lossy = torch.zeros(num_records, dtype=torch.bool)

    @property
    def bytes(self) -> int:
        """Memory that is taken."""
        return sum(held.bytes for held in self._buffers)

    def clear(self) -> None:
        """Drop all copies, and their memory."""
        self._buffers = []
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
        if not self._buffers:
            return None
        there = self.holds(ids) & (self._hash[ids] == hashes)
        if any(self._buffers[0].padded):
            if length is None:
                return None
            there &= self._length[ids] <= length
        parts: list[Records] = []
        for number, held in enumerate(self._buffers):
            rows = (there & (self._buffer[ids] == number)).nonzero().squeeze(1)
            if len(rows):
                parts.append(self._taken(held, boundary, ids, rows, ragged, length))
        return joined(parts)[0] if parts else None

    def _taken(
        self,
        held: _Buffers,
        boundary: int,
        ids: Tensor,
        rows: Tensor,
        ragged: Ragged | None,
        length: int | None,
    ) -> Records:
        """Return the copies of some rows of a batch, all of one buffer."""
        found = ids[rows]
        lengths = self._length[found] if any(held.padded) else None
        padded_to = 0 if length is None else length
        at = {False: bring(self._record[found], self.device)}
        if lengths is not None:
            steps = torch.arange(padded_to)
            places = self._position[found].unsqueeze(1) + steps
            places[steps >= lengths.unsqueeze(1)] = 0
            at[True] = bring(places.reshape(-1), self.device)
        tensors = []
        for buffer, padded in zip(held.tensors, held.padded, strict=True):
            taken = buffer.index_select(0, at[padded])
            if padded:
                taken = taken.view(len(rows), padded_to, *taken.shape[1:])
            tensors.append(taken)
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
            batch = _Batch(
                tensors,
                padded,
                fills,
                ids=ids[records.rows],
                hashes=hashes[records.rows],
                lengths=torch.zeros_like(records.rows) if lengths is None else lengths,
                lossy=records.lossy,
            )
            self._keep(batch)
        return records

    def _keep(self, batch: _Batch) -> None:
        """Copy rows as far as there is room."""
        rows = _first_of_each(batch.ids)
        rows = rows[~self.holds(batch.ids[rows])]
        if self._buffers:
            if not self._buffers[-1].accept(batch.tensors, batch.padded):
                return
            rows = self._fill(batch, rows)
        left = len(rows) + 1
        while 0 < len(rows) < left and self._extend(batch, batch.lengths[rows]):
            left, rows = len(rows), self._fill(batch, rows)

    def _fill(self, batch: _Batch, rows: Tensor) -> Tensor:
        """Copy rows to the last buffers; return those for which there is no room."""
        held = self._buffers[-1]
        room = held.fit(batch.lengths[rows])
        rows, rest = rows[:room], rows[room:]
        if room == 0:
            return rest
        new, sizes = batch.ids[rows], batch.lengths[rows]
        records, positions = held.used
        ends = positions + sizes.cumsum(0)
        taken = {False: bring(rows, self.device)}
        if any(held.padded):
            size = batch.tensors[held.padded.index(True)].shape[1]  # of all of them
            steps = torch.arange(size)
            flat = rows.unsqueeze(1) * size + steps
            taken[True] = bring(flat[steps < sizes.unsqueeze(1)], self.device)
        for buffer, tensor, padded in zip(
            held.tensors, batch.tensors, held.padded, strict=True
        ):
            source = tensor.flatten(0, 1) if padded else tensor
            begin = positions if padded else records
            count = len(taken[padded])
            buffer[begin : begin + count].copy_(source.index_select(0, taken[padded]))
        self._buffer[new] = len(self._buffers) - 1
        self._record[new] = torch.arange(records, records + len(rows))
        self._position[new] = ends - sizes
        self._length[new] = sizes
        self._hash[new] = batch.hashes[rows]
        self._lossy[new] = batch.lossy
        held.used = (records + len(rows), positions + int(sizes.sum()))
        return rest

    def _extend(self, batch: _Batch, lengths: Tensor) -> bool:
        """Take memory for rows of these lengths and others like them, if any is left.

        It is for as many as are still expected; where more have come, for half as
        many again. Lengths of 0 tell nothing of others.
        """
        fixed = positional = 0
        for tensor, padded in zip(batch.tensors, batch.padded, strict=True):
            size = tensor.element_size() * tensor.shape[1 + padded :].numel()
            if padded:
                positional += size
            else:
                fixed += size
        held = sum(buffers.used[0] - 1 for buffers in self._buffers)
        records = self._expected - held
        if records < 1:
            records = min(max(len(lengths), held // 2), len(self._record) - held)
        if any(batch.padded) and not lengths.any():
            records = min(records, len(lengths))
        longest = _LONGER * float(lengths.double().mean())
        most = self._budget_bytes - self.bytes - fixed - positional  # places 0
        records = min(records, int(most / max(fixed + positional * longest, 1)))
        if records < 1:
            return False
        positions = max(int(records * longest), int(lengths[:records].sum()))
        if positional:
            positions = min(positions, (most - records * fixed) // positional)
        tensors = []
        try:
            for tensor, padded, fill in zip(
                batch.tensors, batch.padded, batch.fills, strict=True
            ):
                places = 1 + (positions if padded else records)
                tensors.append(tensor.new_empty((places, *tensor.shape[1 + padded :])))
                tensors[-1][:1].fill_(fill)
        except torch.OutOfMemoryError as error:
            self._off = True
            more = "more " if self._buffers else ""
            _LOG.warning(
                "cache: no %scopies of records on %s: %s", more, self.device, error
            )
            return False
        self._buffers.append(_Buffers(tensors, batch.padded))
        return True


def _first_of_each(ids: Tensor) -> Tensor:
    """Return the positions of the first of equal ids, ascending."""
    kinds, which = torch.unique(ids, return_inverse=True)
    if len(kinds) == len(ids):
        return torch.arange(len(ids))
    first = torch.full((len(kinds),), len(ids))
    first.scatter_reduce_(0, which, torch.arange(len(ids)), "amin")
    return first.sort().values
