"""Stands for ``torchgpipe.microbatch``: a batch is one tensor or a tuple of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipetransformer.compat.pipeline.sync.microbatch import Batch as _Batch
from pipetransformer.compat.pipeline.sync.microbatch import cut, gather
from pipetransformer.pipe.gpipe import check_value

__all__ = ["Batch", "check", "gather", "scatter"]

Tensors = tuple[torch.Tensor, ...]
TensorOrTensors = torch.Tensor | Tensors


class Batch(_Batch):
    """A micro-batch: a tensor or a tuple of tensors, the one value of each layer.

    Args:
        value: A tensor ``(rows, ...)`` or a tuple of them.

    Raises:
        TypeError: if anything in it is no tensor.
    """

    def __init__(self, value: TensorOrTensors) -> None:
        super().__init__(value)

    @property
    def value(self) -> object:
        """The tensor of an atomic batch, otherwise the tuple."""
        return self.values

    @property
    def tensor_or_tensors(self) -> object:
        """The same."""
        return self.values

    @property
    def tensors(self) -> tuple[object, ...]:
        """The tuple of a batch that is not atomic.

        Raises:
            AttributeError: if the batch is one tensor.
        """
        if self.atomic:
            raise AttributeError("batch: expected a tuple of tensors, got one tensor")
        return tuple(self)

    def call(self, function: Callable[..., object]) -> Batch:
        """Call a function with the value as its one argument; hold what it returns."""
        output = function(self.value)
        check_value("batch", output)
        return Batch(output)  # type: ignore[arg-type]  # what was just checked

    def _check(self, values: Sequence[object]) -> None:
        check_value("batch", tuple(values))


def check(input: TensorOrTensors) -> None:
    """Raise unless a `GPipe` takes this input.

    Raises:
        TypeError: for anything but a tensor or a tuple of tensors.
    """
    check_value("input", input)


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Cut along dimension 0.

    Args:
        input: A tensor ``(rows, ...)`` or a tuple of them.
        chunks: Number of micro-batches, as for ``torch.Tensor.chunk``.

    Returns:
        The micro-batches.

    Raises:
        RuntimeError: if two tensors give different numbers of micro-batches.
    """
    if isinstance(input, torch.Tensor):
        return [Batch(part) for part in input.chunk(chunks)]
    return [Batch(row) for row in cut(input, chunks)]  # type: ignore[arg-type]
