"""Freezes and unfreezes layers; the only place that changes their flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from pipetransformer.autofreeze.policy import check_count


class LayerFreezer:
    """Keeps the layers below the boundary frozen, the others as the user made them.

    Frozen means: ``requires_grad`` off, no gradient, evaluation mode (no dropout,
    batch-norm statistics fixed). The parameters stay where they are, in the model and
    in the optimizer's groups: without a gradient every torch optimizer skips them,
    weight decay included, and keeps their state. Not thread-safe.

    Args:
        layers: the whole model. Its ``requires_grad`` flags are the user's mask; a
            layer's part of it is remembered when the layer freezes.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers
        self._mask: dict[nn.Parameter, bool] = {}
        self._boundary = 0
        self._training = layers.training
        self._still: list[nn.Module] = []  # the frozen layers

    def apply(self, boundary: int) -> None:
        """Freeze the layers below `boundary`, unfreeze those from it on.

        Unfreezing restores the remembered mask and the mode last set by ``train``.

        Raises:
            ValueError: a boundary outside [0, number of layers].
        """
        check_count("boundary", boundary, len(self._layers))
        frozen = {
            p: None for layer in self._frozen(boundary) for p in layer.parameters()
        }
        for parameter in [p for p in self._mask if p not in frozen]:
            parameter.requires_grad_(self._mask.pop(parameter))
        for parameter in frozen:
            self._mask.setdefault(parameter, parameter.requires_grad)
            parameter.grad = None
            parameter.requires_grad_(False)
        for layer in list(self._layers)[boundary : self._boundary]:
            layer.train(self._training)
        self._boundary = boundary
        self._still = self._frozen(boundary)
        for layer in self._still:
            layer.eval()

    def hold_still(self) -> None:
        """Put frozen layers back into evaluation mode where ``model.train()`` reached.

        Cheap where it did not, since it asks the layers alone and not their modules.
        """
        for layer in self._still:
            if layer.training:
                layer.eval()

    def train(self, mode: bool = True) -> None:
        """Set the active layers to training or evaluation; frozen ones stay in eval."""
        self._training = mode
        self._layers.training = mode
        for index, layer in enumerate(self._layers):
            layer.train(mode and index >= self._boundary)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Hold all layers in eval mode, and give each module its own mode back.

        A script may hold some of them in eval mode meanwhile, such as batch norms.
        """
        found = [(module, module.training) for module in self._layers.modules()]
        training = self._training
        self.train(False)
        try:
            yield
        finally:
            self.train(True)
            for module, mode in found:  # each before what it holds
                if module.training != mode:
                    module.train(mode)
            self._training = training

    def assert_consistent(self) -> None:
        """Check that nothing has switched a frozen layer on again.

        Raises:
            RuntimeError: naming the layer and what was changed.
        """
        for index, layer in enumerate(self._frozen(self._boundary)):
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad:
                    _refuse(index, f"requires_grad off for {name}", "on")
                if parameter.grad is not None:
                    _refuse(index, f"no gradient of {name}", "one")
            for name, module in layer.named_modules():
                if module.training:
                    where = f"module {name}" if name else "the layer"
                    _refuse(index, f"{where} in evaluation mode", "training mode")

    def _frozen(self, boundary: int) -> list[nn.Module]:
        return list(self._layers)[:boundary]


def _refuse(index: int, wanted: str, got: str) -> None:
    raise RuntimeError(
        f"frozen layer {index}: expected {wanted}, got {got}; something changed it "
        "behind the engine's back, or please report this"
    )
