"""Checks that what layers hand on where they may freeze fits any micro-batch."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from pipetransformer.core.fixed_values import tensors_have_rows
from pipetransformer.planner import _values
from pipetransformer.planner._flow import Flow, call
from pipetransformer.planner._timing import Place, evaluating


def check_handed_on(
    layers: nn.Sequential, sample: object, boundaries: Collection[int], *, place: Place
) -> None:
    """Run the sample, and it twice in one, and compare what has no rows.

    Fewer rows than the sample has may be too few for a layer, as for batch statistics.

    Args:
        layers: the model.
        sample: inputs of the first layer; of one row alone nothing is compared.
        boundaries: where layers may have to be cut off.
        place: brings each layer to where it runs, and back.

    Raises:
        TypeError: a layer before a boundary returns something else each time.
    """
    if _values.num_rows(sample) < 2:
        return
    rows = _values.num_rows(sample)
    one = Flow(_values.first_rows(sample, rows), spreads=True)
    two = Flow(_values.twice(sample), spreads=True)
    with torch.no_grad():
        for index, layer in enumerate(list(layers)[: max(boundaries, default=0)]):
            with place(layer), evaluating(layer):
                one = one.after(layer, call(layer, one.at(layer)))
                two = two.after(layer, call(layer, two.at(layer)))
            if index + 1 in boundaries and not isinstance(one.value, Tensor):
                named = f"{index} ({type(layer).__name__})"
                tensors_have_rows(named, (one.value, two.value), (rows, 2 * rows))
