"""Measures bytes: what autograd holds for backward, and what crosses boundaries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipetransformer.planner._flow import Flow, call
from pipetransformer.planner._timing import Place, left


def saved_and_boundary_bytes(
    layers: nn.Sequential, value: object, *, place: Place = left
) -> tuple[list[int], list[int]]:
    """Run all layers once and count per layer.

    Args:
        layers: the model.
        value: inputs of the first layer.
        place: brings each layer to where it is measured, and back.

    Returns:
        Bytes first saved for backward by each layer, and bytes of what later layers
        need when it has run: its outputs, and the skips not popped yet.
    """
    counter = _SavedBytes()
    saved, boundary = [], []
    flow = Flow(value)
    hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda t: t)
    with torch.enable_grad(), hooks:
        for layer in layers:
            with place(layer):
                counter.exclude(layer)
                flow = flow.after(layer, call(layer, flow.at(layer)))
            saved.append(counter.take())
            crossing = list(flow.tensors())
            counter.hold(crossing)
            boundary.append(sum(t.numel() * t.element_size() for t in crossing))
    return saved, boundary


class _SavedBytes:
    """Adds up the storages saved for backward, each once, state excluded.

    Storages are told apart by address; it holds on to what it has seen, so that no
    address is used twice.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._seen: set[tuple[torch.device, int]] = set()
        self._bytes = 0

    def exclude(self, layer: nn.Module) -> None:
        """Leave out the state of a layer, where it is now."""
        state = [*layer.parameters(), *layer.buffers()]
        # Detached: a parameter that is moved takes its storage along.
        self._held += [tensor.detach() for tensor in state]
        self._seen |= {_storage(tensor) for tensor in state}

    def take(self) -> int:
        """Return the bytes saved since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken

    def hold(self, tensors: list[Tensor]) -> None:
        """Keep tensors alive."""
        self._held.extend(tensors)

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        key = _storage(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._held.append(tensor.detach())
            self._bytes += tensor.untyped_storage().nbytes()
        return tensor.detach()


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
