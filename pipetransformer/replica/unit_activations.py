"""What each unit of the model gives for a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.core.devices import to_device
from pipetransformer.data.structures import call_layers, tensors_of
from pipetransformer.pipe import draw_scope
from pipetransformer.skip import SkipTracker, use_skip_tracker


def unit_activations(
    model: nn.Sequential, unit_ends: Collection[int], inputs: Any, *, seed: int
) -> Iterator[Tensor]:
    """Run the layers, wherever they are, one after the other.

    The caller holds the model in eval mode, without gradients.

    Args:
        model: The layers.
        unit_ends: Index behind the last layer of each unit.
        inputs: Of the batch.
        seed: Of layers that draw even so.

    Yields:
        Behind each unit the first floating-point tensor, ``(rows, ...)``: others are
        masks or positions.
    """
    value = inputs
    draws = draw_scope(seed, 0, microbatch=0, layer=0)
    with draws, use_skip_tracker(SkipTracker()):
        for number, layer in enumerate(model, start=1):
            held = (*layer.parameters(), *layer.buffers())
            if held:
                value = to_device(value, held[0].device)
            value = call_layers([layer], value)
            if number in unit_ends:
                yield _first(value)


def _first(value: Any) -> Tensor:
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and tensor.dim() > 0:
            return tensor
    return torch.zeros(1, 1)
