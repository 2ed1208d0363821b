"""What each unit of the model gives for a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.core.devices import HOST
from pipetransformer.data.structures import rows_of, slice_rows, tensors_of
from pipetransformer.pipe import draw_scope
from pipetransformer.replica.in_place import outputs_in_place


def unit_activations(
    model: nn.Sequential,
    unit_ends: Collection[int],
    inputs: Any,
    *,
    most_rows: int,
    seed: int,
) -> list[Tensor]:
    """Run the layers, wherever they are, one after the other.

    The caller holds the model in eval mode, without gradients.

    Args:
        model: The layers.
        unit_ends: Index behind the last layer of each unit.
        inputs: Of the batch.
        most_rows: That are run at once, at least 1.
        seed: Of layers that draw even so.

    Returns:
        Of each unit the first floating-point tensor with the inputs' rows, ``(rows,
        ...)`` on the host: others are masks, positions or fixed values.
    """
    rows = rows_of(inputs)
    # Copies, not views: the first layer may work in place, and they are asked again.
    cut = [
        slice_rows(inputs, torch.arange(at, min(at + most_rows, rows)))
        for at in range(0, rows, most_rows)
    ]
    parts = [list(_unit_outputs(model, unit_ends, piece, seed)) for piece in cut]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _unit_outputs(
    model: nn.Sequential, unit_ends: Collection[int], value: Any, seed: int
) -> Iterator[Tensor]:
    rows = rows_of(value)
    with draw_scope(seed, 0, microbatch=0, layer=0):
        for number, output in enumerate(outputs_in_place(model, value), start=1):
            if number in unit_ends:
                yield _first(output, rows).flatten(1).to(HOST)


def _first(value: Any, rows: int) -> Tensor:
    found = [t for t in tensors_of(value) if t.is_floating_point() and t.dim() > 0]
    of_rows = (tensor for tensor in found if len(tensor) == rows)
    return next(of_rows, found[0] if found else torch.zeros(rows, 1))
