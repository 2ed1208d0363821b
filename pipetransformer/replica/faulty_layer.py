"""Names the frozen layer that does not give a row the same values each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.data.structures import (
    layer_outputs,
    rows_of,
    slice_rows,
    tensors_of,
)


def faulty_layer(
    layers: Sequence[nn.Module],
    inputs: Any,
    row: int,
    *,
    scope: Callable[[int], AbstractContextManager[object]],
    differ: Callable[[Sequence[Tensor], Sequence[Tensor]], str | None],
) -> str | None:
    """Run a batch twice and one of its rows alone, and compare layer by layer.

    Args:
        layers: The frozen layers.
        inputs: Of a batch.
        row: The row that is run alone, too.
        scope: What the n-th run happens in: no other run has its random draws.
        differ: Says how far tensors are apart beyond rounding, or None.

    Returns:
        The first layer whose outputs differ, and what that means. None: no layer's do.
    """

    def run(number: int, rows: Tensor) -> list[list[Tensor]]:
        with scope(number):  # copies: layers may work in place
            values = layer_outputs(layers, slice_rows(inputs, rows))
            return [[tensor.clone() for tensor in tensors_of(v)] for v in values]

    def of_row(tensor: Tensor) -> Tensor:  # fixed values have none
        has_rows = tensor.dim() > 0 and len(tensor) == len(whole)
        return tensor[row : row + 1] if has_rows else tensor

    whole = torch.arange(rows_of(inputs))
    once, twice, alone = run(0, whole), run(1, whole), run(0, whole[row : row + 1])
    runs = zip(layers, once, twice, alone, strict=True)
    for index, (layer, values, again, single) in enumerate(runs):
        name = f"layer {index} ({type(layer).__name__})"
        if any(not torch.equal(a, b) for a, b in zip(values, again, strict=True)):
            return (
                f"{name} gives a batch other values when it runs again: it draws "
                "random numbers in eval mode, or its kernels are not deterministic"
            )
        if differ(list(map(of_row, values)), single) is not None:
            return (
                f"{name} gives a row other values alone than in its batch: it mixes "
                "rows"
            )
    return None
