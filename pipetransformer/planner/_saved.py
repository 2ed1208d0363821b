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
    flow = Flow(value, spreads=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(counter.count, _never)
    with torch.enable_grad(), hooks:
        for layer in layers:
            with place(layer):
                counter.exclude(layer)
                flow = flow.after(layer, call(layer, flow.at(layer)))
            crossing = list(flow.tensors())
            saved.append(counter.take(crossing))
            boundary.append(sum(t.numel() * t.element_size() for t in crossing))
    return saved, boundary


class _SavedBytes:
    """Adds up the storages saved for backward, each once, state excluded.

    Storages are told apart by address, so what a layer saves stays until it has run;
    nothing of it stays longer, but for what the next layers need.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._seen: set[tuple[torch.device, int]] = set()
        self._bytes = 0

    def exclude(self, layer: nn.Module) -> None:
        """Leave out the state of a layer, where it is now."""
        self._seen.update(map(_storage, [*layer.parameters(), *layer.buffers()]))

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that autograd saves; nothing is saved."""
        key = _storage(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._held.append(tensor.detach())
            self._bytes += tensor.untyped_storage().nbytes()

    def take(self, crossing: list[Tensor]) -> int:
        """Return the bytes saved since the last call.

        Args:
            crossing: what later layers need, which counts once for all of them.
        """
        self._seen &= set(map(_storage, crossing))
        # Detached: their graph refers to this object in a way that the garbage
        # collector does not see.
        self._held = [tensor.detach() for tensor in crossing]
        taken, self._bytes = self._bytes, 0
        return taken


def _never(_: object) -> Tensor:
    raise RuntimeError("backward of what was only counted; please report")


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
