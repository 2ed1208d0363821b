"""Runs layers one after another, each cut off from the graphs of the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipetransformer.skip.namespace import Namespace
from pipetransformer.skip.tracker import SkipTracker, use_skip_tracker


def layerwise_sandbox(
    module: nn.Sequential, device: torch.device | str | int
) -> Iterator[nn.Module]:
    """Yield a copy of each layer, on ``device`` and in train mode.

    Args:
        module: The layers; left as they are.
        device: Where the copies go.
    """
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


class Chain:
    """The way of a sample through layers: outputs become inputs, skips are kept.

    For each layer call `next_input`, `forward` and, if wanted, `backward`.

    Args:
        sample: Input of the first layer, tensors at any depth of containers.
        device: Where the layers are.
        spread: Whether a tuple or list is spread into arguments.
    """

    def __init__(self, sample: object, device: torch.device, spread: bool) -> None:
        self._value = pytree.tree_map_only(
            torch.Tensor, lambda x: x.detach().to(device), sample
        )
        self._spread = spread
        self._skips = _Skips()

    def next_input(self) -> None:
        """Make inputs that require grad and may be changed in place."""
        self._value = pytree.tree_map_only(torch.Tensor, _fresh, self._value)
        self._skips.refresh()

    def forward(self, layer: nn.Module) -> None:
        """Call a layer, its graph kept until the next input."""
        value = self._value
        with torch.enable_grad(), use_skip_tracker(self._skips):
            if self._spread and isinstance(value, (tuple, list)):
                self._value = layer(*value)
            else:
                self._value = layer(value)

    def backward(self) -> None:
        """Run backward from what the layer returned and stashed."""
        tensors = [x for x in pytree.tree_leaves(self._value) if _is_tensor(x)]
        roots = [x for x in [*tensors, *self._skips.stashed] if x.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])


class _Skips(SkipTracker):
    """Remembers what the layer that runs has stashed."""

    def __init__(self) -> None:
        super().__init__()
        self.stashed: list[torch.Tensor] = []

    def save(
        self, namespace: Namespace | None, name: str, tensor: torch.Tensor | None
    ) -> None:
        super().save(namespace, name, tensor)
        if tensor is not None:
            self.stashed.append(tensor)

    def refresh(self) -> None:
        self.stashed.clear()
        for key, tensor in self._tensors.items():
            self._tensors[key] = None if tensor is None else _fresh(tensor)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    # A clone: layers may work in place, which a leaf that requires grad forbids.
    carries_grad = tensor.is_floating_point() or tensor.is_complex()
    with torch.enable_grad():
        return tensor.detach().requires_grad_(carries_grad).clone()
