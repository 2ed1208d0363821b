"""Fixed values: what a layer hands on besides rows, the same for every micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from pipetransformer.core.containers import leaves


def same(one: object, other: object) -> bool:
    """Tell whether two values that are no containers are equal."""
    if one is other:  # also where it holds NaN
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays and tensors in it
        return False


def tensors_have_rows(
    layer: str, outputs: tuple[object, object], rows: tuple[int, int]
) -> list[bool]:
    """Tell for each tensor that a layer hands on whether it has the batch's rows.

    One that has several for each sample has rows, too.

    Args:
        layer: Its name, for the error.
        outputs: What it returns for two batches.
        rows: Of these batches; they differ.

    Raises:
        TypeError: something in it has no rows and is not fixed.
    """
    pairs = [list(leaves(output)) for output in outputs]
    if len(pairs[0]) != len(pairs[1]):
        raise _changing(layer, f"{len(pairs[0])} and {len(pairs[1])} values")
    found = []
    for one, other in zip(*pairs, strict=True):
        has_rows = _length(one) * rows[1] == _length(other) * rows[0] > 0
        if not has_rows and not same(one, other):
            raise _changing(layer, f"another {_named(one)} for each")
        if isinstance(one, Tensor):
            found.append(has_rows)
    return found


def _length(value: object) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else 0


def _changing(layer: str, got: str) -> TypeError:
    return TypeError(
        f"layer {layer}: expected tensors with the batch's rows, and what has none to "
        "be the same for every micro-batch, as layers up to it may freeze (unless no "
        f"unit ends there, units=, or with freeze=pt.freeze.Never()), got {got}"
    )


def _named(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return type(value).__name__
