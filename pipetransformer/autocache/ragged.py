"""Rows that differ in length, padded to one length in each batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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

    Args:
        lengths: ``lengths(inputs)`` -> ``(rows,)`` integers: how many positions of each
            row are valid, from the first on. `inputs` is what the first layer takes. A
            row that is padded in front is valid up to its end.
        dim: Which dim of the tensors at a boundary is padded, counted with the rows'
            (0). One for all that have as many dims, or one per tensor, None for one of
            fixed shape.
        fill: What stands behind a row's end. One for all tensors or one per tensor.
        input_dim: The same as `dim` for the inputs, in their order.

    Raises:
        TypeError, ValueError: a field of another kind, or out of range.
    """

    lengths: Callable[[Any], Tensor]
    dim: Dims = 1
    fill: float | tuple[float, ...] = 0.0
    input_dim: Dims = 1

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
        if not self.fills or not all(isinstance(f, (int, float)) for f in self.fills):
            raise ValueError(
                f"Ragged.fill: expected a number or one per tensor, got {self.fill!r}"
            )

    @property
    def fills(self) -> tuple[float, ...]:
        """Return `fill` as a tuple."""
        return self.fill if isinstance(self.fill, tuple) else (self.fill,)

    def misfit(self, tensors: Sequence[Tensor], padded: int) -> str | None:
        """Say why tensors at a boundary are not padded as this says, or None.

        Args:
            tensors: What crosses the boundary, each ``(rows, ...)``.
            padded: Padded length of the inputs.
        """
        try:
            dims = dims_of(tensors, self.dim)
        except ValueError as error:
            return str(error)
        for number, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
            fill = self.fills[min(number, len(self.fills) - 1)]
            if dim is not None and not _holds(tensor.dtype, fill):
                return f"ragged: expected a fill that {tensor.dtype} holds, got {fill}"
        sizes = {t.shape[d] for t, d in zip(tensors, dims, strict=True) if d}
        if sizes <= {padded}:
            return None
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        return (
            f"ragged: expected tensors of the inputs' padded length {padded} along "
            f"dim={self.dim}, got shapes {shapes}; name one dim per tensor, None where "
            "it is not padded"
        )

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
        sizes = {t.shape[d] for t, d in zip(tensors, dims, strict=True) if d}
        if len(sizes) != 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ValueError(
                "ragged: expected inputs of one padded length along input_dim="
                f"{self.input_dim}, got shapes {shapes}"
            )
        (padded,) = sizes
        lengths = self.lengths(inputs)
        if not isinstance(lengths, Tensor) or lengths.is_floating_point():
            raise TypeError(
                f"Ragged.lengths: expected a tensor of integers, got {lengths!r}"
            )
        lengths = lengths.detach().to("cpu", torch.int64)
        rows = len(tensors[0])
        if lengths.shape != (rows,) or not bool(
            ((lengths >= 0) & (lengths <= padded)).all()
        ):
            raise ValueError(
                f"Ragged.lengths: expected {rows} numbers of 0..{padded} (the padded "
                f"length), got {lengths.tolist()}"
            )
        return RaggedRows(moved(tensors, dims), flags(dims), lengths, padded)


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedRows:
    """Tensors whose rows have lengths of their own.

    Attributes:
        tensors: Each ``(rows, ...)``, the padded dim, if there is one, as dim 1.
        ragged: Which tensors have one.
        lengths: Valid positions of each row, ``(rows,)`` int64.
        padded: Size of the padded dim.
    """

    tensors: list[Tensor]
    ragged: list[bool]
    lengths: Tensor
    padded: int


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


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Tell whether torch fills a tensor of this type with a value."""
    try:
        torch.full((2,), value, dtype=dtype)  # of one alone it is cast
    except RuntimeError:
        return False
    return True


def valid_part(
    tensors: Sequence[Tensor], ragged: Ragged | None, length: int | None
) -> list[Tensor]:
    """Return what of one row, ``(1, ...)`` each, is no padding."""
    if ragged is None or length is None:
        return list(tensors)
    dims = dims_of(tensors, ragged.dim)
    return [
        tensor if dim is None else tensor.narrow(dim, 0, length)
        for tensor, dim in zip(tensors, dims, strict=True)
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
