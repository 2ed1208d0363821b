"""Stages that only wait, and random pipelines of them, for any number of slots.

A layer is two operations in a row. Each waits in forward, and in backward once for the
gradient of its input and once for that of its weight, apart from each other: so ZB-H1
can split it, and the first layer that trains drops the input gradient of its first
operation, as a layer that computes does. Waiting leaves the interpreter and needs no
processor, so many stages overlap on two cores.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HETEROGENEOUS, HALF_FROZEN = "heterogeneous", "half-frozen"
UNEQUAL = "unequal micro-batches"  # heterogeneous as well
MIXES = (HETEROGENEOUS, HALF_FROZEN, UNEQUAL)
ROWS = 8  # of a micro-batch; of some, one more
# Of each part of a random layer.
LEAST_S, MOST_S = 2e-3, 10e-3


@dataclass(frozen=True)
class Wait:
    """Seconds of one layer for a micro-batch of ``ROWS`` rows; proportional to them.

    Attributes:
        forward_s: Forward.
        input_grad_s: Gradient of the input, at least a third of ``forward_s``.
        weight_grad_s: Gradient of the weights.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float


@dataclass(frozen=True)
class WaitPipeline:
    """One random pipeline; every layer is a stage.

    Attributes:
        mix: One of ``MIXES``.
        waits: One per stage.
        num_frozen: Leading stages that do not train.
        num_microbatches: M.
        num_larger: Micro-batches of ``ROWS + 1`` rows, fewer than M.
    """

    mix: str
    waits: tuple[Wait, ...]
    num_frozen: int
    num_microbatches: int
    num_larger: int = 0

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.waits)

    def model(self) -> nn.Sequential:
        """Return the stages, one layer each."""
        layers = [WaitLayer(wait) for wait in self.waits]
        for layer in layers[: self.num_frozen]:
            layer.requires_grad_(False)
        return nn.Sequential(*layers)

    def batch(self) -> Tensor:
        """Return inputs of a step."""
        return torch.zeros(ROWS * self.num_microbatches + self.num_larger, 1)

    def sizes(self) -> list[int]:
        """Return the sizes of its micro-batches, each once."""
        return [ROWS, ROWS + 1] if self.num_larger else [ROWS]


class _WaitOp(torch.autograd.Function):
    """Waits and hands on what it was given, in both passes."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        value: Tensor,
        forward_s: float,
        backward_s: float,
    ) -> Tensor:
        ctx.backward_s = backward_s  # type: ignore[attr-defined]
        _wait(forward_s)
        return value.view_as(value)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        _wait(ctx.backward_s)  # type: ignore[attr-defined]
        return grad, None, None


class WaitLayer(nn.Module):
    """Two operations that wait; the first one's input gradient is forward / 3.

    Args:
        wait: How long, both together.
    """

    def __init__(self, wait: Wait) -> None:
        super().__init__()
        first_s = wait.forward_s / 3
        half_s = wait.weight_grad_s / 2
        self.forward_s = wait.forward_s
        self.input_grads_s = (first_s, wait.input_grad_s - first_s)
        self.weight_grads_s = (half_s, half_s)
        self.weights = nn.ParameterList(torch.zeros(1) for _ in self.weight_grads_s)

    def forward(self, value: Tensor) -> Tensor:
        """Return the value, ``(rows, 1)``, after the wait."""
        share = len(value) / ROWS
        forward_s = share * self.forward_s  # all of it in the first operation
        for weight, input_grad_s, weight_grad_s in zip(
            self.weights, self.input_grads_s, self.weight_grads_s, strict=True
        ):
            waited = _waits(value, forward_s, share * input_grad_s)
            value = waited + _waits(weight, 0.0, share * weight_grad_s)
            forward_s = 0.0
        return value


def _waits(value: Tensor, forward_s: float, backward_s: float) -> Tensor:
    waited: Tensor = _WaitOp.apply(  # type: ignore[no-untyped-call]
        value, forward_s, backward_s
    )
    return waited


def _wait(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def random_pipelines(
    num_stages: Sequence[int], per_length: int, seed: int
) -> list[WaitPipeline]:
    """Return pipelines of each length, the mixes in turn.

    Forward takes 2 to 10 ms, the gradient of the input and that of the weights 2 to 10
    ms each, drawn for every stage; M is drawn from 2 to 2K, and from K on where some
    micro-batches have a row more than others.

    Args:
        num_stages: The lengths K, each at least 2.
        per_length: Pipelines of each.
        seed: Of the draws.
    """
    draw = random.Random(seed)
    found = []
    for length in num_stages:
        for number in range(per_length):
            mix = MIXES[number % len(MIXES)]
            waits = tuple(_random_wait(draw) for _ in range(length))
            frozen = draw.randint(1, length - 1) if mix == HALF_FROZEN else 0
            least = length if mix == UNEQUAL else 2
            count = draw.randint(least, 2 * length)
            larger = draw.randint(1, count - 1) if mix == UNEQUAL else 0
            found.append(WaitPipeline(mix, waits, frozen, count, larger))
    return found


def _random_wait(draw: random.Random) -> Wait:
    forward_s, input_s, weight_s = (draw.uniform(LEAST_S, MOST_S) for _ in range(3))
    return Wait(forward_s, max(input_s, forward_s / 3), weight_s)
