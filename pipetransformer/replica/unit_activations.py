"""What each unit of the model gives for a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.core.devices import HOST, to_device
from pipetransformer.data.structures import call_layers, rows_of, slice_rows, tensors_of
from pipetransformer.pipe import draw_scope
from pipetransformer.skip import Namespace, SkipTracker, use_skip_tracker


class _Following(SkipTracker):
    """Hands out what was stashed where the layer that pops it is."""

    device = HOST

    def load(self, namespace: Namespace | None, name: str) -> Tensor | None:
        return to_device(super().load(namespace, name), self.device)


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
        Of each unit the first floating-point tensor, ``(rows, ...)`` on the host:
        others are masks or positions.
    """
    rows = rows_of(inputs)
    parts = [
        list(
            _unit_outputs(
                model, unit_ends, slice_rows(inputs, slice(at, at + most_rows)), seed
            )
        )
        for at in range(0, rows, most_rows)
    ]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _unit_outputs(
    model: nn.Sequential, unit_ends: Collection[int], value: Any, seed: int
) -> Iterator[Tensor]:
    tracker = _Following()
    draws = draw_scope(seed, 0, microbatch=0, layer=0)
    with draws, use_skip_tracker(tracker):
        for number, layer in enumerate(model, start=1):
            held = (*layer.parameters(), *layer.buffers())
            if held:
                tracker.device = held[0].device
                value = to_device(value, tracker.device)
            value = call_layers([layer], value)
            if number in unit_ends:
                yield _first(value).flatten(1).to(HOST)


def _first(value: Any) -> Tensor:
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and tensor.dim() > 0:
            return tensor
    return torch.zeros(rows_of(value), 1)
