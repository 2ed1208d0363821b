"""The transformer encoder that the pipelines are timed with, and its batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the encoder and of one batch.

    By default an eighth of the batch computes about as fast on one thread as the
    whole: with a wider model or fewer tokens each micro-batch would pay more for
    adding its weight gradients than a pipeline can win.
    """

    blocks: int = 12
    width: int = 192
    heads: int = 3
    tokens: int = 128
    rows: int = 32


def encoder(shape: Shape, seed: int) -> nn.Sequential:
    """Return the blocks, equally long each; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    shape.width,
                    shape.heads,
                    4 * shape.width,
                    dropout=0.0,
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(shape.blocks)
            )
        )


def batch(shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, ``(rows, tokens, width)`` each."""
    generator = torch.Generator().manual_seed(seed)
    size = (2, shape.rows, shape.tokens, shape.width)
    inputs, targets = torch.randn(size, generator=generator)
    return inputs, targets


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error, 0-dim."""
    return nn.functional.mse_loss(outputs, targets)


def train_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Compute fresh gradients of the whole batch at once."""
    model.zero_grad()
    mean_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
