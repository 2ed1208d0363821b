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
    with torch.enable_grad():
        for layer in layers:
            with place(layer):
                counter.exclude(layer)
                flow = flow.after(layer, _counted_call(layer, flow.at(layer), counter))
            crossing = list(flow.tensors())
            saved.append(counter.take(crossing))
            boundary.append(sum(t.numel() * t.element_size() for t in crossing))
    return saved, boundary


def _counted_call(layer: nn.Module, taken: Flow, counter: _SavedBytes) -> Flow:
    """Call a layer and count what is saved; its outputs, where that cannot be seen."""
    hooks = torch.autograd.graph.saved_tensors_hooks(counter.count, _Saved.get)
    try:
        with hooks:
            return call(layer, taken)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # torch.func takes no such hooks; other errors come again
        given = call(layer, taken)
    for tensor in given.tensors():
        counter.count(tensor)
    return given


class _Saved:
    """A tensor that is there until its layer has run, which may take a gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()

    def get(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError("backward of what was only counted; please report")
        return self.tensor


class _SavedBytes:
    """Adds up the storages saved for backward, each once, state excluded.

    Storages are told apart by address, so what a layer saves stays until it has run;
    nothing of it stays longer, but for what the next layers need.
    """

    def __init__(self) -> None:
        self._held: list[_Saved] = []
        self._crossing: list[Tensor] = []
        self._seen: set[tuple[torch.device, int]] = set()
        self._bytes = 0

    def exclude(self, layer: nn.Module) -> None:
        """Leave out the state of a layer, where it is now."""
        self._seen.update(map(_storage, [*layer.parameters(), *layer.buffers()]))

    def count(self, tensor: Tensor) -> _Saved:
        """Count a tensor that autograd saves."""
        key = _storage(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._bytes += tensor.untyped_storage().nbytes()
        self._held.append(_Saved(tensor))
        return self._held[-1]

    def take(self, crossing: list[Tensor]) -> int:
        """Return the bytes saved since the last call.

        Args:
            crossing: what later layers need, which counts once for all of them.
        """
        self._seen &= set(map(_storage, crossing))
        for saved in self._held:
            saved.tensor = None
        self._held = []
        # Detached: their graph refers to this object in a way that the garbage
        # collector does not see.
        self._crossing = [tensor.detach() for tensor in crossing]
        taken, self._bytes = self._bytes, 0
        return taken


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
