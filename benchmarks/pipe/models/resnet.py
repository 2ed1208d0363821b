"""ResNet-101 as a chain of stem, 33 bottleneck blocks and head."""

from __future__ import annotations

from torch import Tensor, nn

from pipetransformer.pipe import PipeSequential

BLOCKS = (3, 4, 23, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, added to a shortcut.

    Args:
        inputs: Channels in.
        width: Channels of the 3x3 convolution; four times as many come out.
        stride: Of the 3x3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, value: Tensor) -> Tensor:
        """Return ``(rows, 4 * width, height / stride, width / stride)``."""
        total: Tensor = self.body(value) + self.shortcut(value)
        return nn.functional.relu(total)


def resnet101(*, width: int = 64, classes: int = 1000) -> nn.Sequential:
    """Return the network for images ``(rows, 3, side, side)``.

    Args:
        width: Channels after the stem; 64 in the paper.
        classes: Of the output ``(rows, classes)``.

    Source: Deep residual learning for image recognition, table 1.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for group, count in enumerate(BLOCKS):
        for k in range(count):
            stride = 2 if group > 0 and k == 0 else 1
            inner = width * 2**group
            layers.append(Bottleneck(channels, inner, stride))
            channels = EXPANSION * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return PipeSequential(*layers)
