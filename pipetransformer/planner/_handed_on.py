"""Checks that what layers return has rows where batches are cut, cached or joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from pipetransformer.core.fixed_values import tensors_have_rows
from pipetransformer.planner import _values
from pipetransformer.planner._flow import Flow, call
from pipetransformer.planner._timing import Place, evaluating


class NeedsWholeBatches(TypeError):
    """Layers are right for batches that are not cut into micro-batches, and only so."""


def check_handed_on(
    layers: nn.Sequential,
    sample: object,
    boundaries: Collection[int],
    *,
    least: int,
    cuts: bool,
    place: Place,
) -> None:
    """Compare what layers hand on where they may freeze for one batch and for it twice.

    A few rows show whether a tensor has one row per sample. What else there is may be
    fixed, which is compared for all rows of the sample: fewer may be too few for a
    layer, as for batch statistics.

    Args:
        layers: the model.
        sample: inputs of the first layer; of one row alone nothing is compared.
        boundaries: where layers may have to be cut off.
        least: rows that every layer can do with.
        cuts: batches may be cut into micro-batches behind a boundary.
        place: brings each layer to where it runs, and back.

    Raises:
        NeedsWholeBatches: a cut may go through a sample, and batches may be cut.
        TypeError: a layer before a boundary returns a tensor without a row per sample,
            or something else each time.
    """
    rows = _values.num_rows(sample)
    if rows < 2:
        return
    front = list(layers)[: max(boundaries, default=0)]
    few = _values.first_rows(sample, least)
    several: dict[int, int] = {}  # rows of one sample, where it has more
    ends = []
    for end, (one, two) in enumerate(_once_and_twice(front, few, place), 1):
        if end not in boundaries:
            continue
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            several[end] = _rows_of_sample(_named(layers, end), (one, two), least)
        else:
            ends.append(end)
    front = front[: max(ends, default=0)]
    taken = _values.first_rows(sample, rows)
    for end, pair in enumerate(_once_and_twice(front, taken, place), 1):
        if end in ends:
            have_rows = tensors_have_rows(_named(layers, end), pair, (rows, 2 * rows))
            found = zip(_values.tensors(pair[0]), have_rows, strict=True)
            counts = [len(tensor) // rows for tensor, has_rows in found if has_rows]
            several[end] = max(counts, default=1)
    if cuts:
        _check_cut(layers, few, least, several, place)


def check_outputs(
    layers: nn.Sequential, sample: object, *, least: int, place: Place
) -> None:
    """Refuse outputs of the model that cannot be joined along their rows.

    The layers run in the mode that they are in, as in training, and each on inputs that
    take a gradient, which it may ask for.

    Args:
        layers: the model.
        sample: inputs of the first layer; of one row alone nothing is compared.
        least: rows that every layer can do with.
        place: brings each layer to where it runs, and back.

    Raises:
        NeedsWholeBatches: a tensor of the outputs has as many rows for twice the
            samples.
        TypeError: one of them has no rows.
    """
    if _values.num_rows(sample) < 2:
        return
    few = _values.first_rows(sample, least)
    pair = []
    for inputs in (few, _values.twice(few)):
        flow = Flow(inputs, spreads=True)
        for layer in layers:
            with torch.enable_grad(), place(layer):
                given = call(layer, flow.at(layer))
            flow = flow.after(layer, given).map(_cut_off)
        pair.append(list(_values.tensors(flow.value)))
    for one, two in zip(*pair, strict=False):
        if one.dim() == 0 or len(one) == len(two) > 0:
            refusal = TypeError if one.dim() == 0 else NeedsWholeBatches
            raise refusal(
                f"layer {_named(layers, len(layers))}: expected outputs with the "
                "batch's rows in dim 0, along which those of micro-batches are joined, "
                f"got a tensor of shape {_shapes((one, two), least)}"
            )


def _cut_off(tensor: Tensor) -> Tensor:
    """Return a tensor that takes a gradient, without what it was computed from."""
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    with torch.enable_grad():
        return tensor.requires_grad_().clone()  # no leaf: layers may work in place


def _rows_of_sample(layer: str, pair: tuple[Tensor, Tensor], rows: int) -> int:
    """Return how many rows each sample has in a tensor.

    Args:
        layer: Its name, for the error.
        pair: What it returns for a batch and for it twice.
        rows: Of the former.

    Raises:
        TypeError: other than the batch's rows, or several times as many.
    """
    counts = [len(tensor) if tensor.dim() else 0 for tensor in pair]
    if counts[0] == 0 or counts[1] != 2 * counts[0] or counts[0] % rows:
        got = f"a tensor of shape {_shapes(pair, rows)}"
        raise TypeError(_without_rows(layer, got))
    return counts[0] // rows


def _check_cut(
    layers: nn.Sequential,
    few: object,
    rows: int,
    several: dict[int, int],
    place: Place,
) -> None:
    """Refuse several rows per sample that a later layer brings together again.

    A cut may go through a sample then. Where the model gives as many rows of each, its
    layers take them as samples of their own.

    Args:
        layers: the model.
        few: inputs of a few rows.
        rows: how many.
        several: rows of one sample, by boundary.
        place: brings each layer to where it runs, and back.

    Raises:
        NeedsWholeBatches: there are such rows.
    """
    several = {end: count for end, count in several.items() if count > 1}
    if not several:
        return
    (output,) = deque(_through(list(layers), few, place=place), maxlen=1)
    given = {len(t) for t in _values.tensors(output) if t.dim()}
    for end, count in several.items():
        if count * rows not in given:
            got = f"{count} rows of each sample"
            raise NeedsWholeBatches(_without_rows(_named(layers, end), got))


def _without_rows(layer: str, got: str) -> str:
    return (
        f"layer {layer}: expected tensors with one row per sample in dim 0, as layers "
        "up to it may freeze (unless no unit ends there, units=, or with "
        f"freeze=pt.freeze.Never()), got {got}"
    )


def _named(layers: nn.Sequential, end: int) -> str:
    return f"{end - 1} ({type(layers[end - 1]).__name__})"


def _shapes(pair: tuple[Tensor, Tensor], rows: int) -> str:
    one, two = (tuple(tensor.shape) for tensor in pair)
    samples = "1 sample" if rows == 1 else f"{rows} samples"
    return f"{one} for {samples} and {two} for {2 * rows}"


def _once_and_twice(
    layers: Sequence[nn.Module], inputs: object, place: Place
) -> Iterator[tuple[object, object]]:
    """Yield what each layer returns for inputs, and for these twice in one."""
    one = _through(layers, inputs, place=place)
    two = _through(layers, _values.twice(inputs), place=place)
    return zip(one, two, strict=True)


def _through(
    layers: Sequence[nn.Module], inputs: object, *, place: Place
) -> Iterator[object]:
    """Yield what each layer returns for the inputs of the first one."""
    flow = Flow(inputs, spreads=True)
    for layer in layers:
        with torch.no_grad(), place(layer), evaluating(layer):
            flow = flow.after(layer, call(layer, flow.at(layer)))
        yield flow.value
