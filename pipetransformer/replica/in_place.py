"""Runs layers one after the other, each where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from pipetransformer.core.devices import HOST, to_device
from pipetransformer.data.structures import call_with
from pipetransformer.skip import Namespace, SkipTracker, use_skip_tracker


class _Following(SkipTracker):
    """Hands out what was stashed where the layer that pops it is."""

    device = HOST

    def load(self, namespace: Namespace | None, name: str) -> Tensor | None:
        return to_device(super().load(namespace, name), self.device)


def outputs_in_place(
    layers: Iterable[nn.Module], value: Any, *, first: bool = True
) -> Iterator[Any]:
    """Yield what each layer returns; values and skips are brought to its device.

    Args:
        layers: In order. One without tensors is where the one before it is.
        value: What the first one takes.
        first: As for `arguments_of`.
    """
    tracker = _Following()
    with use_skip_tracker(tracker):
        for layer in layers:
            held = (*layer.parameters(), *layer.buffers())
            if held:
                tracker.device = held[0].device
                value = to_device(value, tracker.device)
            value = call_with(layer, value, first=first)
            first = False
            yield value


def run_in_place(layers: Iterable[nn.Module], value: Any, *, first: bool = True) -> Any:
    """Return what the last of the layers returns, as `outputs_in_place`."""
    for output in outputs_in_place(layers, value, first=first):
        value = output
    return value
