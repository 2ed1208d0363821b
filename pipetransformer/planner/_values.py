"""Walks what layers take and return: tensors in tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pipetransformer.core.containers import leaves, map_tensors


def tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a value, in order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def num_rows(inputs: object) -> int:
    """Return the size of dimension 0 of the first tensor.

    Raises:
        TypeError: there is no tensor with rows, or one that is sparse or nested, whose
            rows nobody can take.
    """
    for tensor in tensors(inputs):
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise TypeError(
                f"sample: expected strided tensors, got a {kind} one; hand over a "
                "dense one, as by to_dense() in collate_fn, of which the first layer "
                "can make what it needs"
            )
    first = next(tensors(inputs), None)
    if first is None or first.dim() == 0:
        parts = {type(part).__name__ for part in _parts(inputs)}
        of = f" of {', '.join(sorted(parts))}" if parts else ""
        raise TypeError(
            "sample: expected a tensor with rows in it, got "
            f"{type(inputs).__name__}{of}"
            f"{'; collate_fn turns text into tensors' if 'str' in parts else ''}"
        )
    return first.size(0)


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value


def check_returned(layer: str, value: object) -> None:
    """Refuse mappings that a pipeline would take for one value, with tensors unseen.

    Args:
        layer: its name, for the error.
        value: what it returned.

    Raises:
        TypeError: a mapping in it is no plain dict.
    """
    if isinstance(value, Mapping) and type(value) is not dict:
        raise TypeError(
            f"layer {layer}: expected tensors in tuples, lists and plain dicts, got "
            f"{type(value).__name__}; return one of these, such as dict(...)"
        )
    for part in _parts(value):
        check_returned(layer, part)


def first_rows(inputs: object, size: int) -> object:
    """Return copies of the first ``size`` rows; tensors without rows stay."""
    return _with_rows(inputs, lambda rows: rows[:size].clone())


def twice(inputs: object) -> object:
    """Return all rows twice; tensors without rows stay."""
    return _with_rows(inputs, lambda rows: torch.cat([rows, rows]))


def _with_rows(inputs: object, change: Callable[[Tensor], Tensor]) -> object:
    total = num_rows(inputs)

    def changed(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() > 0 and tensor.size(0) == total
        return change(tensor) if has_rows else tensor

    return map_tensors(inputs, changed)
