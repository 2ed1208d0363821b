"""Marks fixed tensors in what frozen layers hand on: micro-batches get them whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from pipetransformer.core.containers import leaves, map_tensors
from pipetransformer.core.fixed_values import same
from pipetransformer.pipe import NoChunk


def with_fixed(pieces: Sequence[Any], have_rows: Sequence[bool]) -> list[Any]:
    """Return the outputs of pieces of a batch, each fixed tensor as one `NoChunk`.

    Args:
        pieces: Of equal structure.
        have_rows: Of each tensor in their order, whether it is cut.

    Raises:
        TypeError: pieces differ in a tensor that is not cut.
    """
    held = [[leaf for leaf in leaves(p) if isinstance(leaf, Tensor)] for p in pieces]
    fixed = [
        None if has_rows else NoChunk(tensor)
        for tensor, has_rows in zip(held[0], have_rows, strict=True)
    ]
    for tensors in held[1:]:
        if len(tensors) != len(fixed) or not all(
            whole is None or same(tensor, whole.tensor)
            for tensor, whole in zip(tensors, fixed, strict=True)
        ):
            raise TypeError(
                "frozen layers: expected equal tensors for each micro-batch where they "
                "have no rows, got others"
            )

    def marked(piece: Any) -> Any:
        wholes: Iterator[Any] = iter(fixed)
        return map_tensors(piece, lambda tensor: next(wholes) or tensor)

    return [marked(piece) for piece in pieces]
