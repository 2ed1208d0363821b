"""Rows that differ in length, padded to one length in each batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipetransformer.core.containers import map_tensors

Dims = int | None | tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Ragged:
    """How rows of different lengths are padded, so that a sample is cached without it.

    Text is padded to the longest sample of its batch; the cache then keeps each
    sample's own part, whatever it was padded with, and pads what it reads to the
    batch at hand. What stands at padded positions is the fill, not what the frozen
    layers made of the padding: it must not matter to the valid positions, nor to the
    loss, as a mask of the attention sees to it.

    Valid positions hold what recomputing them in a batch of the same padded length
    gives, bit for bit. In a batch of another length matrix products may round
    otherwise (fp32: about 1e-6 of a value).

    A row may have several lengths, such as a source and a target text. A record then
    takes as many positions of each tensor as the longest of them has.

    Args:
        lengths: ``lengths(inputs)`` -> ``(rows,)`` integers: how many positions of each
            row are valid, from the first on. `inputs` is what the first layer takes. A
            row that is padded in front is valid up to its end. A row with none is
            kept with its padding: padded to another length it is another sample. Of
            several lengths ``(rows, lengths)``.
        dim: Which dim of the tensors at a boundary is padded, counted with the rows'
            (0). One for all that have as many dims, or one per tensor, None for one of
            fixed shape. Tensors are in the order in which layers hand them on, those
            of a mapping in its own.
        fill: What stands behind a row's end. One for all tensors or one per tensor.
        input_dim: The same as `dim` for the inputs, in their order; those of a mapping
            are in the order of their sorted names.
        which: Of rows with several lengths the number of each tensor's, at a boundary.
        input_which: The same for the inputs.
        fixed: Numbers and tensors without rows at a boundary are the same whatever
            length rows are padded to, as a table of weights is. Without it they are
            taken to depend on the length, and nothing is cached where there are any.

    Raises:
        TypeError, ValueError: a field of another kind, or out of range.
    """

    lengths: Callable[[Any], Tensor]
    dim: Dims = 1
    fill: float | tuple[float, ...] = 0.0
    input_dim: Dims = 1
    which: tuple[int, ...] | None = None
    input_which: tuple[int, ...] | None = None
    fixed: bool = False

    def __post_init__(self) -> None:
        if not callable(self.lengths):
            raise TypeError(f"Ragged.lengths: expected a function, got {self.lengths}")
        for name, dims in (("dim", self.dim), ("input_dim", self.input_dim)):
            each = dims if isinstance(dims, tuple) else (dims,)
            if not any(type(dim) is int and dim >= 1 for dim in each) or not all(
                dim is None or (type(dim) is int and dim >= 1) for dim in each
            ):
                raise ValueError(
                    f"Ragged.{name}: expected a number >= 1 or one (or None) per "
                    f"tensor, got {dims!r}"
                )
        self._check_which()
        if not self.fills or not all(isinstance(f, (int, float)) for f in self.fills):
            raise ValueError(
                f"Ragged.fill: expected a number or one per tensor, got {self.fill!r}"
            )

    def _check_which(self) -> None:
        for name in ("which", "input_which"):
            given = getattr(self, name)
            if given is not None and not (
                isinstance(given, tuple)
                and all(type(number) is int and number >= 0 for number in given)
            ):
                raise TypeError(
                    f"Ragged.{name}: expected a tuple of numbers >= 0 or None, got "
                    f"{given!r}"
                )
        if (self.which is None) != (self.input_which is None):
            raise ValueError(
                "Ragged.which: expected it with input_which or none of them, got "
                f"which={self.which}, input_which={self.input_which}"
            )
        if self.which is None or self.input_which is None:
            return
        known = set(self.input_which)
        if known != set(range(len(known))) or not known.issuperset(self.which):
            raise ValueError(
                "Ragged.input_which: expected the numbers of all lengths from 0 on, "
                f"got which={self.which}, input_which={self.input_which}"
            )

    @property
    def fills(self) -> tuple[float, ...]:
        """Return `fill` as a tuple."""
        return self.fill if isinstance(self.fill, tuple) else (self.fill,)

    @property
    def has_several(self) -> bool:
        """Tell whether a row has several lengths."""
        return isinstance(self.which, tuple)

    def misfit(self, tensors: Sequence[Tensor], padded: Sequence[int]) -> str | None:
        """Say why tensors at a boundary are not padded as this says, or None.

        Args:
            tensors: What crosses the boundary, each ``(rows, ...)``.
            padded: Padded lengths of the inputs.
        """
        try:
            dims = dims_of(tensors, self.dim)
            kinds = _each(self.which, tensors)
        except ValueError as error:
            return str(error)
        for number, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
            fill = self.fills[min(number, len(self.fills) - 1)]
            if dim is not None and not _holds(tensor.dtype, fill):
                return f"ragged: expected a fill that {tensor.dtype} holds, got {fill}"
        if all(
            dim is None or tensor.shape[dim] == padded[kind]
            for tensor, dim, kind in zip(tensors, dims, kinds, strict=True)
        ):
            return None
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        text = ", ".join(map(str, padded))
        return (
            f"ragged: expected tensors of the inputs' padded length {text} along "
            f"dim={self.dim}, got shapes {shapes}; name one dim per tensor, None where "
            "it is not padded"
        )

    def narrowed(
        self, inputs: Any, tensors: Sequence[Tensor], lengths: Sequence[int]
    ) -> Any:
        """Return the inputs of one row without its padding.

        Args:
            inputs: What the first layer takes.
            tensors: Its tensors, in order, each ``(1, ...)``.
            lengths: Of the row.
        """
        dims, kinds = dims_of(tensors, self.input_dim), _each(self.input_which, tensors)
        cut = {
            id(tensor): tensor if dim is None else tensor.narrow(dim, 0, lengths[kind])
            for tensor, dim, kind in zip(tensors, dims, kinds, strict=True)
        }
        return map_tensors(inputs, lambda tensor: cut[id(tensor)])

    def not_narrowed(
        self, tensors: Sequence[Tensor], lengths: Sequence[int]
    ) -> str | None:
        """Say what at a boundary is no padded dim: it stays as it is without padding.

        Args:
            tensors: What crosses the boundary for `narrowed` inputs, ``(1, ...)`` each.
            lengths: Of the row.
        """
        dims, kinds = dims_of(tensors, self.dim), _each(self.which, tensors)
        for tensor, dim, kind in zip(tensors, dims, kinds, strict=True):
            if dim is not None and tensor.shape[dim] != lengths[kind]:
                return (
                    f"ragged: expected tensors of the inputs' length along dim={dim}, "
                    f"got shape {tuple(tensor.shape)} for a row of {lengths[kind]} "
                    "positions; name one dim per tensor, None where it is not padded"
                )
        return None

    def rows_of(self, inputs: Any, tensors: Sequence[Tensor]) -> RaggedRows:
        """Return the tensors of a batch's inputs with the length of each row.

        Args:
            inputs: What the first layer takes.
            tensors: Its tensors, in order, each ``(rows, ...)``.

        Raises:
            TypeError, ValueError: the tensors are not padded as this says, or
                `lengths` gives something else than a length per row.
        """
        dims = dims_of(tensors, self.input_dim)
        kinds = _each(self.input_which, tensors)
        sizes: dict[int, set[int]] = {}
        for tensor, dim, kind in zip(tensors, dims, kinds, strict=True):
            if dim is not None:
                sizes.setdefault(kind, set()).add(tensor.shape[dim])
        one_each = all(len(each) == 1 for each in sizes.values())
        if not one_each or set(sizes) != set(kinds):
            with contextlib.suppress(LookupError, TypeError, RuntimeError):
                self.lengths(inputs)  # it may say better what is wrong
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ValueError(
                "ragged: expected inputs of one padded length along input_dim="
                f"{self.input_dim}, got shapes {shapes}{_by_name(inputs)}; name one "
                "dim per tensor, None where it is not padded"
            )
        padded = [sizes[kind].pop() for kind in sorted(sizes)]
        lengths = self.lengths(inputs)
        if not isinstance(lengths, Tensor) or lengths.is_floating_point():
            raise TypeError(
                f"Ragged.lengths: expected a tensor of integers, got {lengths!r}"
            )
        lengths = lengths.detach().to("cpu", torch.int64)
        rows = len(tensors[0])
        shape = (rows, len(padded)) if self.has_several else (rows,)
        if lengths.shape != shape or not bool(
            ((lengths >= 0) & (lengths <= torch.tensor(padded))).all()
        ):
            text = ", ".join(map(str, padded))
            raise ValueError(
                f"Ragged.lengths: expected {rows} numbers of 0..{text} (the padded "
                f"length along input_dim={self.input_dim}{_by_name(inputs)}), got "
                f"{lengths.tolist()}"
            )
        own = lengths.view(rows, len(padded))
        # What reads a row of padding alone reads padding, so that is its content.
        bare = (own == 0).any(1)
        own = torch.where(own > 0, own, torch.tensor(padded))
        longest, widest = own.amax(1), max(padded)
        found = RaggedRows(
            moved(tensors, dims), flags(dims), longest, widest, own, padded, bare
        )
        if self.has_several:
            found.tensors[:] = [
                _of_length(tensor, own[:, kind], found.padded, 0.0)
                if ragged
                else tensor
                for tensor, ragged, kind in zip(
                    found.tensors, found.ragged, kinds, strict=True
                )
            ]
            # Zeros may be values: only the lengths tell what is there.
            found.tensors.append(own)
            found.ragged.append(False)
        return found

    def joined(self, tensors: Sequence[Tensor], rows: RaggedRows) -> Sequence[Tensor]:
        """Return tensors at a boundary as records hold them, all of one length.

        Args:
            tensors: What crosses the boundary, each ``(rows, ...)``.
            rows: The inputs of the batch.
        """
        if not self.has_several:
            return tensors
        dims, kinds = dims_of(tensors, self.dim), _each(self.which, tensors)
        fills = [self.fills[min(n, len(self.fills) - 1)] for n in range(len(tensors))]
        wide = [
            tensor
            if dim is None
            else _of_length(tensor, rows.own[:, kind], rows.padded, fill)
            for tensor, dim, kind, fill in zip(
                moved(tensors, dims), dims, kinds, fills, strict=True
            )
        ]
        return moved(wide, dims, back=True)

    def parted(self, tensors: Sequence[Tensor], rows: RaggedRows) -> Sequence[Tensor]:
        """Return what records hold as the tensors of a batch, each of its own length.

        Args:
            tensors: Of one length, see `joined`.
            rows: The inputs of the batch.
        """
        if not self.has_several:
            return tensors
        dims, kinds = dims_of(tensors, self.dim), _each(self.which, tensors)
        return [
            tensor
            if dim is None
            else tensor.narrow(dim, 0, rows.widths[kind]).contiguous()
            for tensor, dim, kind in zip(tensors, dims, kinds, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedRows:
    """Tensors whose rows have lengths of their own.

    Attributes:
        tensors: Each ``(rows, ...)``, the padded dim, if there is one, as dim 1.
        ragged: Which tensors have one.
        lengths: Valid positions of each row, of several lengths the longest,
            ``(rows,)`` int64.
        padded: Size of the padded dim.
        own: All lengths of each row, ``(rows, lengths)`` int64.
        widths: What each length is padded to in the batch.
        bare: Which rows had no valid position, ``(rows,)`` bool; all of theirs count.
    """

    tensors: list[Tensor]
    ragged: list[bool]
    lengths: Tensor
    padded: int
    own: Tensor
    widths: list[int]
    bare: Tensor


def dims_of(tensors: Sequence[Tensor], dims: Dims) -> list[int | None]:
    """Return the padded dim of each tensor, None where there is none.

    Raises:
        ValueError: there is not one entry per tensor, or a tensor has no such dim.
    """
    if not isinstance(dims, tuple):
        return [dims if dims and t.dim() > dims else None for t in tensors]
    if len(dims) != len(tensors) or any(
        dim is not None and tensor.dim() <= dim
        for tensor, dim in zip(tensors, dims, strict=False)
    ):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"ragged: expected tensors with dims {dims}, got {shapes}")
    return list(dims)


def _each(which: tuple[int, ...] | None, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the number of each tensor's length.

    Raises:
        ValueError: there are more or fewer tensors than numbers.
    """
    if which is not None and len(which) != len(tensors):
        raise ValueError(
            f"ragged: expected a number of a length per tensor, got {which} for "
            f"{len(tensors)}"
        )
    return (0,) * len(tensors) if which is None else which


def _of_length(tensor: Tensor, lengths: Tensor, length: int, fill: float) -> Tensor:
    """Return rows of another length, dim 1, with the fill behind their own ends."""
    wide = tensor.new_full((len(tensor), length, *tensor.shape[2:]), fill)
    there = torch.arange(tensor.shape[1]) < lengths.unsqueeze(1)
    there = there.to(tensor.device).view(*there.shape, *[1] * (tensor.dim() - 2))
    part = wide[:, : tensor.shape[1]]
    part.copy_(torch.where(there, tensor, part))
    return wide


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Tell whether torch fills a tensor of this type with a value."""
    try:
        torch.full((2,), value, dtype=dtype)  # of one alone it is cast
    except RuntimeError:
        return False
    return True


def valid_part(
    tensors: Sequence[Tensor], ragged: Ragged | None, lengths: Sequence[int] | None
) -> list[Tensor]:
    """Return what of one row, ``(1, ...)`` each, is no padding."""
    if ragged is None or lengths is None:
        return list(tensors)
    dims, kinds = dims_of(tensors, ragged.dim), _each(ragged.which, tensors)
    return [
        tensor if dim is None else tensor.narrow(dim, 0, lengths[kind])
        for tensor, dim, kind in zip(tensors, dims, kinds, strict=True)
    ]


def flags(dims: Sequence[int | None]) -> list[bool]:
    """Return which tensors are padded."""
    return [dim is not None for dim in dims]


def moved(
    tensors: Sequence[Tensor], dims: Sequence[int | None], *, back: bool = False
) -> list[Tensor]:
    """Return views with the padded dim as dim 1, or `back` in its place."""
    return [
        tensor
        if dim is None
        else (tensor.movedim(1, dim) if back else tensor.movedim(dim, 1))
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _by_name(inputs: Any) -> str:
    """Say in which order the tensors of a mapping are."""
    if not isinstance(inputs, Mapping):
        return ""
    return f" of {', '.join(sorted(map(str, inputs)))}, in this order"
