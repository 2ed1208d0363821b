"""Checks that what layers hand on where they may freeze fits any micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from pipetransformer.core.fixed_values import tensors_have_rows
from pipetransformer.planner import _values
from pipetransformer.planner._flow import Flow, call
from pipetransformer.planner._timing import Place, evaluating


def check_handed_on(
    layers: nn.Sequential,
    sample: object,
    boundaries: Collection[int],
    *,
    least: int,
    place: Place,
) -> None:
    """Run the sample, and it twice in one, and compare what has no rows.

    Fewer rows than the sample has may be too few for a layer, as for batch statistics.
    Where a few show that tensors alone are handed on, there is nothing to compare.

    Args:
        layers: the model.
        sample: inputs of the first layer; of one row alone nothing is compared.
        boundaries: where layers may have to be cut off.
        least: rows that every layer can do with.
        place: brings each layer to where it runs, and back.

    Raises:
        TypeError: a layer before a boundary returns something else each time.
    """
    rows = _values.num_rows(sample)
    if rows < 2:
        return
    front = list(layers)[: max(boundaries, default=0)]
    few = _values.first_rows(sample, least)
    shown = enumerate(_through(front, few, place=place), 1)
    ends = [e for e, v in shown if e in boundaries and not isinstance(v, Tensor)]
    front = front[: max(ends, default=0)]
    one = _through(front, _values.first_rows(sample, rows), place=place)
    two = _through(front, _values.twice(sample), place=place)
    for end, values in enumerate(zip(one, two, strict=True), 1):
        if end in ends:
            named = f"{end - 1} ({type(layers[end - 1]).__name__})"
            tensors_have_rows(named, values, (rows, 2 * rows))


def _through(
    layers: Sequence[nn.Module], inputs: object, *, place: Place
) -> Iterator[object]:
    """Yield what each layer returns for the inputs of the first one."""
    flow = Flow(inputs, spreads=True)
    for layer in layers:
        with torch.no_grad(), place(layer), evaluating(layer):
            flow = flow.after(layer, call(layer, flow.at(layer)))
        yield flow.value
