"""Measures bytes: what autograd holds for backward, and what crosses boundaries.

What is saved is told apart by how it grows with micro-batches, from calls of each layer
with different numbers of rows. The same storage in two calls belongs to all of them
(autocast's casts of weights, tables that a layer keeps). Storages of the same size in
two calls belong to each call, whatever its rows (``weight_norm``'s weights, seeds of
attention). What is left grows with the rows; where its sums in three calls lie on a
line, a part of it is fixed (a recurrent layer's workspace).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pipetransformer.planner._flow import Flow, call
from pipetransformer.planner._timing import Place, left
from pipetransformer.planner._values import first_rows


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """What a layer takes in a micro-batch of the rows it was measured with.

    Args:
        by_rows: first saved for backward by this layer, and more with more rows.
        by_call: saved by each call besides, however many rows.
        shared: saved once for all calls.
        boundary: of what later layers need when it has run: its outputs, and the skips
            not popped yet.
    """

    by_rows: int
    by_call: int
    shared: int
    boundary: int


def layer_bytes(
    layers: nn.Sequential, sample: object, sizes: Sequence[int], *, place: Place = left
) -> list[LayerBytes]:
    """Run all layers and count the bytes of each.

    Args:
        layers: the model.
        sample: inputs of the first layer.
        sizes: rows of them to run in each call, falling, three at most; of one call
            all that is saved counts by rows.
        place: brings each layer to where it is measured, and back.
    """
    runs = [_Run(first_rows(sample, size)) for size in sizes]
    found = []
    with torch.enable_grad():
        for layer in layers:
            with place(layer):
                saved = [run.call(layer) for run in runs]
            for run in runs:
                run.leave()
            found.append(_told_apart(saved, sizes, runs[0].boundary()))
    return found


def _told_apart(
    saved: Sequence[_Storages], sizes: Sequence[int], boundary: int
) -> LayerBytes:
    """Compare what a layer saved in a call with what it saved in smaller ones."""
    whole = sum(saved[0].values())
    if len(saved) == 1:
        return LayerBytes(whole, 0, 0, boundary)
    both = saved[0].keys() & saved[1].keys()
    shared = sum(saved[0][key] for key in both)
    own = [[size for key, size in each.items() if key not in both] for each in saved]
    by_call = 0
    if len({len(each) for each in own}) == 1:  # else they cannot be paired: all by rows
        pairs = zip(own[0], own[1], strict=True)
        by_call = sum(size for size, other in pairs if size == other)
        by_call += _fixed_part([sum(each) - by_call for each in own], sizes)
    return LayerBytes(whole - shared - by_call, by_call, shared, boundary)


def _fixed_part(sums: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the part of the first sum that all have, if three lie on a line.

    Sums of layers whose values decide what they save, as of those that drop padding,
    do not.
    """
    if len(sums) < 3:
        return 0
    growth = -(-(sums[0] - sums[1]) * sizes[0] // (sizes[0] - sizes[1]))  # of all rows
    fixed = sums[0] - growth
    on_line = abs(fixed + growth * sizes[2] // sizes[0] - sums[2]) <= sums[0] // 100
    return fixed if on_line and growth > 0 and fixed > 0 else 0


class _Run:
    """Inputs on their way through the layers, with what each saves."""

    def __init__(self, value: object) -> None:
        self._flow = Flow(value, spreads=True)
        self._counter = _SavedBytes()

    def call(self, layer: nn.Module) -> _Storages:
        """Run a layer; return what it saved, which stays until ``leave``."""
        self._counter.exclude(layer)
        given = _counted_call(layer, self._flow.at(layer), self._counter)
        self._flow = self._flow.after(layer, given)
        return self._counter.found

    def leave(self) -> None:
        """Let go of what was saved but for what later layers need."""
        self._counter.leave(list(self._flow.tensors()))

    def boundary(self) -> int:
        """Return the bytes of what later layers need."""
        return sum(t.numel() * t.element_size() for t in self._flow.tensors())


def _counted_call(layer: nn.Module, taken: Flow, counter: _SavedBytes) -> Flow:
    """Call a layer and count what is saved; its outputs, where that cannot be seen."""
    # Hooks are no part of layers that are compiled.
    count = torch.compiler.disable(counter.count)  # type: ignore[no-untyped-call]
    hooks = torch.autograd.graph.saved_tensors_hooks(count, _Saved.get)
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


_Address: TypeAlias = tuple[torch.device, int]
_Storages: TypeAlias = dict[_Address, int]  # with bytes of each


class _Saved:
    """A tensor that is there until its layer has run, which may take a gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()

    def get(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError("backward of what was only counted; please report")
        return self.tensor


class _SavedBytes:
    """Finds the storages saved for backward, each once, state excluded.

    Storages are told apart by address, so what a layer saves stays until it has run;
    nothing of it stays longer, but for what the next layers need.
    """

    def __init__(self) -> None:
        self.found: _Storages = {}  # by the layer that runs, in its order
        self._held: list[_Saved] = []
        self._crossing: list[Tensor] = []
        self._seen: set[_Address] = set()

    def exclude(self, layer: nn.Module) -> None:
        """Leave out the state of a layer, where it is now."""
        self._seen.update(map(_storage, [*layer.parameters(), *layer.buffers()]))

    def count(self, tensor: Tensor) -> _Saved:
        """Count a tensor that autograd saves."""
        key = _storage(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self.found[key] = tensor.untyped_storage().nbytes()
        self._held.append(_Saved(tensor))
        return self._held[-1]

    def leave(self, crossing: list[Tensor]) -> None:
        """Begin anew, for the next layer.

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
        self.found = {}


def _storage(tensor: Tensor) -> _Address:
    return tensor.device, tensor.untyped_storage().data_ptr()
