"""Stands for ``torch.distributed.pipeline.sync.microbatch``: cutting, one level deep.

The engine cuts by itself; this is for scripts that call these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import SupportsIndex, overload

import torch

from pipetransformer.pipe import NoChunk
from pipetransformer.pipe.input_checks import check_inputs

__all__ = ["Batch", "NoChunk", "check", "gather", "scatter"]


class Batch:
    """A micro-batch: one tensor, or a sequence of values with a tensor among them.

    Args:
        values: A tensor ``(rows, ...)`` or the values.

    Raises:
        TypeError: if there is no tensor among the values.
    """

    def __init__(self, values: torch.Tensor | Iterable[object]) -> None:
        self.atomic = isinstance(values, torch.Tensor)
        self._values = (values,) if self.atomic else tuple(values)
        self._check(self._values)

    def _check(self, values: Sequence[object]) -> None:
        if not any(isinstance(value, torch.Tensor) for value in values):
            kinds = [type(value).__name__ for value in values]
            raise TypeError(f"batch: expected a tensor among the values, got {kinds}")

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor of an atomic batch.

        Raises:
            AttributeError: if the batch holds several values.
        """
        value = self._values[0]
        if not self.atomic or not isinstance(value, torch.Tensor):
            raise AttributeError(
                f"batch: expected one tensor, got {len(self._values)} values"
            )
        return value

    @property
    def values(self) -> object:
        """The tensor of an atomic batch, otherwise the tuple of values."""
        return self._values[0] if self.atomic else self._values

    def get_device(self) -> torch.device:
        """Return the device of the first tensor."""
        return next(x.device for x in self._values if isinstance(x, torch.Tensor))

    def call(self, function: Callable[..., object]) -> Batch:
        """Call a function with the values as arguments and hold what it returns."""
        output = function(*self._values)
        if isinstance(output, (torch.Tensor, tuple, list)):
            return Batch(output)
        raise TypeError(
            f"batch: expected a tensor or a tuple, got {type(output).__name__}"
        )

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.values!r})"

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[object]:
        return iter(self._values)

    @overload
    def __getitem__(self, index: SupportsIndex) -> object: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[object, ...]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> object:
        return self._values[index]

    def __setitem__(self, index: SupportsIndex | slice, value: object) -> None:
        """Put a value, or with a slice several ones, in place of those there.

        Raises:
            IndexError: for an index without a value; for another number of values
                than one in an atomic batch.
            TypeError: for a slice without a sequence of values; if no tensor would be
                left, or an atomic batch would hold anything else.
        """
        values = list(self._values)
        if isinstance(index, slice):
            if not isinstance(value, (tuple, list)):
                raise TypeError(
                    "batch: expected a tuple or a list for a slice, got "
                    f"{type(value).__name__}"
                )
            values[index] = value
        else:
            values[index] = value
        if self.atomic and len(values) != 1:
            raise IndexError(f"atomic batch: expected one tensor, got {len(values)}")
        self._check(values)
        self._values = tuple(values)


def check(first_device: torch.device, *inputs: object) -> None:
    """Raise unless a pipeline that starts on ``first_device`` takes these inputs.

    Raises:
        TypeError: if no input is a tensor.
        ValueError: for a tensor on another device.
    """
    check_inputs(inputs, {}, torch.device(first_device), strict=True)


def scatter(*inputs: object, chunks: int) -> list[Batch]:
    """Cut tensors along dimension 0; other values go to each micro-batch.

    Args:
        *inputs: Tensors ``(rows, ...)``, `NoChunk` and anything else.
        chunks: Number of micro-batches, as for ``torch.Tensor.chunk``.

    Returns:
        The micro-batches.

    Raises:
        RuntimeError: if two tensors give different numbers of micro-batches.
    """
    if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
        return [Batch(part) for part in inputs[0].chunk(chunks)]
    return [Batch(row) for row in cut(inputs, chunks)]


def cut(inputs: Sequence[object], chunks: int) -> list[tuple[object, ...]]:
    """Return the values of each micro-batch of several inputs, see `scatter`."""
    counts = {len(x.chunk(chunks)) for x in inputs if isinstance(x, torch.Tensor)}
    if len(counts) != 1:
        raise RuntimeError(
            "Found different number of chunks: expected the same from every tensor, "
            f"got {sorted(counts)}"
        )
    columns = [_column(value, chunks, *counts) for value in inputs]
    return list(zip(*columns, strict=True))


def _column(value: object, chunks: int, count: int) -> Sequence[object]:
    if isinstance(value, torch.Tensor):
        return value.chunk(chunks)
    return [value.tensor if isinstance(value, NoChunk) else value] * count


def gather(outputs: Sequence[Batch]) -> object:
    """Put micro-batches together along dimension 0.

    Args:
        outputs: The micro-batches, all of the same kind.

    Returns:
        A tensor for atomic batches; otherwise a tuple with a tensor, or a list of the
        values, at each position.

    Raises:
        TypeError: if micro-batches differ in what they hold at a position.
    """
    if outputs[0].atomic:
        return torch.cat([batch.tensor for batch in outputs])
    return tuple(_gather_position(values) for values in zip(*outputs, strict=True))


def _gather_position(values: Sequence[object]) -> object:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if tensors and len(tensors) != len(values):
        kinds = sorted({type(value).__name__ for value in values})
        raise TypeError(f"outputs: expected one kind at a position, got {kinds}")
    return torch.cat(tensors) if tensors else list(values)
