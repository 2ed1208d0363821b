"""U-Net as a chain; its skips go straight to their layer, or along in tuples."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipetransformer.pipe import PipeSequential
from pipetransformer.pipe.skip import Namespace, Skippable, pop, skippable, stash


class ConvUnit(nn.Module):
    """3x3 convolution, batch norm, ReLU; keeps height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, value: Tensor) -> Tensor:
        """Return ``(rows, outputs, height, width)``."""
        return nn.functional.relu(self.norm(self.conv(value)), inplace=True)


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Keeps its input for the layer that joins it."""

    def forward(self, value: Tensor) -> Generator[Any, Any, Tensor]:  # noqa: D102
        yield stash("skip", value)
        return value


@skippable(pop=["skip"])
class Join(nn.Module):
    """Puts the skip's channels behind its input's."""

    def forward(self, value: Tensor) -> Generator[Any, Any, Tensor]:  # noqa: D102
        skip = yield pop("skip")
        return torch.cat([value, skip], 1)


class Carry(nn.Module):
    """A layer that hands on what it is given besides its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the layer's output and the skips."""
        return _tuple(self.layer(value), *skips)


class CarriedStash(nn.Module):
    """Adds its input to the skips that are handed on."""

    def forward(self, value: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        """Return the input, the skips and the input once more."""
        return (value, *skips, value)


class CarriedJoin(nn.Module):
    """Puts the newest skip's channels behind its input's."""

    def forward(self, value: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the joined tensor and the older skips."""
        return _tuple(torch.cat([value, skips[-1]], 1), *skips[:-1])


def _tuple(value: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
    return (value, *skips) if skips else value


def unet(
    *,
    depth: int = 5,
    convolutions: int = 5,
    width: int = 64,
    channels: int = 3,
    direct: bool = True,
) -> nn.Sequential:
    """Return the network for images ``(rows, channels, side, side)``.

    Args:
        depth: Times that the side is halved; the side is a multiple of ``2**depth``.
        convolutions: Of each level, on the way down and on the way up.
        width: Channels of the first level; each level has twice as many.
        channels: Of the input; the output ``(rows, 1, side, side)`` has one.
        direct: Skips are stashed and popped; else every layer in between takes and
            returns them.

    Source: U-Net: convolutional networks for biomedical image segmentation, with
    padded convolutions and batch norm.
    """
    names = [Namespace() for _ in range(depth)]
    layers: list[nn.Module] = []

    def level(inputs: int, outputs: int) -> None:
        for k in range(convolutions):
            layers.append(ConvUnit(outputs if k else inputs, outputs))

    def isolated(layer: nn.Module, k: int) -> nn.Module:
        return cast("Skippable", layer).isolate(names[k])

    sizes = [width * 2**k for k in range(depth + 1)]
    for k in range(depth):
        level(sizes[k - 1] if k else channels, sizes[k])
        layers += [isolated(Stash(), k) if direct else CarriedStash()]
        layers += [nn.MaxPool2d(2)]
    level(sizes[depth - 1] if depth else channels, sizes[depth])
    for k in reversed(range(depth)):
        layers += [nn.ConvTranspose2d(sizes[k + 1], sizes[k], 2, stride=2)]
        layers += [isolated(Join(), k) if direct else CarriedJoin()]
        level(2 * sizes[k], sizes[k])
    layers.append(nn.Conv2d(sizes[0], 1, 1))
    if direct:
        return PipeSequential(*layers)
    own = (CarriedStash, CarriedJoin)
    return PipeSequential(*(x if isinstance(x, own) else Carry(x) for x in layers))
