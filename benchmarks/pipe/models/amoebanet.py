"""AmoebaNet-D as a chain of cells; each takes the outputs of the two before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipetransformer.pipe import PipeSequential

Operation = Callable[[int, int], nn.Module]


def _conv(inputs: int, outputs: int, kernel: tuple[int, int], stride: int) -> nn.Module:
    """Return ReLU, convolution and batch norm, padded to keep height and width."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _bottleneck(width: int, kernels: list[tuple[int, int]], stride: int) -> nn.Module:
    """Return convolutions on a quarter of the channels; the first has the stride."""
    inner = width // 4
    body = [
        _conv(inner, inner, kernel, 1 if k else stride)
        for k, kernel in enumerate(kernels)
    ]
    ends = _conv(width, inner, (1, 1), 1), _conv(inner, width, (1, 1), 1)
    return nn.Sequential(ends[0], *body, ends[1])


def none(width: int, stride: int) -> nn.Module:
    """The identity, which keeps the size."""
    return nn.Identity()


def conv_1x1(width: int, stride: int) -> nn.Module:
    """A convolution over the channels."""
    return _conv(width, width, (1, 1), stride)


def conv_3x3(width: int, stride: int) -> nn.Module:
    """A 3x3 convolution on a quarter of the channels."""
    return _bottleneck(width, [(3, 3)], stride)


def conv_1x7_7x1(width: int, stride: int) -> nn.Module:
    """A 1x7 and a 7x1 convolution on a quarter of the channels."""
    return _bottleneck(width, [(1, 7), (7, 1)], stride)


def avg_pool_3x3(width: int, stride: int) -> nn.Module:
    """The mean of the neighbours."""
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def max_pool_3x3(width: int, stride: int) -> nn.Module:
    """The largest of the neighbours."""
    return nn.MaxPool2d(3, stride, 1)


def max_pool_2x2(width: int, stride: int) -> nn.Module:
    """The largest of four; used where the size is halved."""
    return nn.MaxPool2d(2, stride)


# Five pairs whose sums are new states 2, 3, ...: (state, operation), twice. States 0
# and 1 are the outputs of the cell before and of the one before that. The states that
# no pair takes are put together.
Pairs = tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
NORMAL: Pairs = (
    ((1, conv_1x1), (1, max_pool_3x3)),
    ((1, none), (0, conv_1x7_7x1)),
    ((0, conv_1x1), (0, conv_1x7_7x1)),
    ((2, max_pool_3x3), (2, none)),
    ((1, avg_pool_3x3), (5, conv_1x1)),
)
NORMAL_OUTPUTS = (0, 3, 4, 6)
REDUCTION: Pairs = (
    ((0, max_pool_2x2), (0, max_pool_3x3)),
    ((2, none), (1, conv_3x3)),
    ((2, conv_1x7_7x1), (2, max_pool_3x3)),
    ((3, none), (1, max_pool_2x2)),
    ((2, avg_pool_3x3), (3, conv_1x1)),
)
REDUCTION_OUTPUTS = (4, 5, 6)


class Halve(nn.Module):
    """Halves the side: two convolutions, one of them a pixel further."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.second = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, value: Tensor) -> Tensor:
        """Return ``(rows, outputs, side / 2, side / 2)``."""
        value = torch.relu(value)
        moved = nn.functional.pad(value, (0, 1, 0, 1))[:, :, 1:, 1:]
        both = torch.cat([self.first(value), self.second(moved)], 1)
        normed: Tensor = self.norm(both)
        return normed


class Cell(nn.Module):
    """One cell of the network.

    Args:
        before: Channels of the cell's older input.
        last: Channels of its newer input.
        width: Channels of each state.
        reduction: Whether the side is halved.
        halve: Whether the older input is twice as large as the newer one.
    """

    def __init__(
        self, before: int, last: int, width: int, *, reduction: bool, halve: bool
    ) -> None:
        super().__init__()
        self.pairs = REDUCTION if reduction else NORMAL
        self.outputs = REDUCTION_OUTPUTS if reduction else NORMAL_OUTPUTS
        self.channels = len(self.outputs) * width
        self.last = _conv(last, width, (1, 1), 1)
        self.before: nn.Module = (
            Halve(before, width) if halve else _conv(before, width, (1, 1), 1)
        )
        self.operations = nn.ModuleList(
            operation(width, 2 if reduction and state < 2 else 1)
            for pair in self.pairs
            for state, operation in pair
        )

    def forward(self, last: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return this cell's output and the newer input."""
        states = [self.last(last), self.before(before)]
        for k, ((first, _), (second, _)) in enumerate(self.pairs):
            one, other = self.operations[2 * k], self.operations[2 * k + 1]
            states.append(one(states[first]) + other(states[second]))
        return torch.cat([states[state] for state in self.outputs], 1), last


class Stem(nn.Module):
    """The first convolution; its output stands for both inputs of the first cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(rows, width, side / 2, side / 2)`` twice."""
        value = self.norm(self.conv(images))
        return value, value


class Head(nn.Module):
    """Mean over the pixels and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """Return ``(rows, classes)``."""
        logits: Tensor = self.linear(last.mean((2, 3)))
        return logits


def amoebanet_d(
    *, cells: int = 18, filters: int = 256, classes: int = 1000
) -> nn.Sequential:
    """Return AmoebaNet-D (cells, filters) for images ``(rows, 3, side, side)``.

    Args:
        cells: Normal cells, a multiple of 3; the side is halved between the thirds.
        filters: Channels of each state in the first third, then doubled twice; a
            multiple of 16.
        classes: Of the output ``(rows, classes)``.

    Source: Regularized evolution for image classifier architecture search, and the
    sizes (L, D) of GPipe, section 3.
    """
    if cells % 3 or filters % 16:
        raise ValueError(
            "amoebanet_d: expected cells in threes and filters in sixteens, got "
            f"{cells} and {filters}"
        )
    width = filters
    layers: list[nn.Module] = [Stem(width)]
    before = last = width
    halve = False

    def add(size: int, *, reduction: bool) -> None:
        nonlocal before, last, halve
        cell = Cell(before, last, size, reduction=reduction, halve=halve)
        layers.append(cell)
        before, last, halve = last, cell.channels, reduction

    for k in (4, 2):
        add(width // k, reduction=True)
    for third in range(3):
        size = width * 2**third
        if third:
            add(size, reduction=True)
        for _ in range(cells // 3):
            add(size, reduction=False)
    layers.append(Head(last, classes))
    return PipeSequential(*layers)
