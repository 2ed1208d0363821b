"""Stages with collectives: one dispatcher gives every rank one order of cells."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipetransformer.pipe import Pipe
from tests.support.default_group import default_group
from tests.support.ranks import run_ranks

from .models import MODES, even_cuts

DEADLINE_S = 100
NUM_STAGES, NUM_MICROBATCHES = 3, 4


class AllSum(torch.autograd.Function):
    """Sum over ranks, in forward and in backward; notes its order."""

    order = []

    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        AllSum.order.append(("forward", stage))
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        AllSum.order.append(("backward", ctx.stage))
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad, None


class ColumnSum(nn.Linear):
    """A layer of which each rank computes a part; every micro-batch is summed."""

    def __init__(self, stage):
        # Sizes differ between stages: collectives in another order would fail.
        super().__init__(5 + stage, 6 + stage, dtype=torch.double)
        self.stage = stage

    def forward(self, x):
        return AllSum.apply(torch.tanh(super().forward(x)), self.stage)


def make_layers(rank):
    torch.manual_seed(rank)
    first, second = ColumnSum(0), ColumnSum(1)
    return nn.Sequential(first, second, nn.Linear(7, 7, dtype=torch.double))


def square(output, target):
    return ((output - target) ** 2).mean()


def run_collectives(rank):
    with default_group(rank, 2):
        return collectives(rank)


def collectives(rank):
    results = {}
    for schedule, mode in itertools.product(("gpipe", "1f1b", "zb-h1"), MODES):
        layers = make_layers(rank)
        takes_loss = schedule != "gpipe"
        pipe = Pipe.from_plan(
            layers,
            cuts=even_cuts(3, NUM_STAGES),
            num_microbatches=NUM_MICROBATCHES,
            checkpoint=mode,
            schedule=schedule,
            loss=square if takes_loss else None,
            dispatch="serial",
        )
        x = torch.linspace(-1, 1, 40, dtype=torch.double).reshape(8, 5)
        target = torch.zeros(8, 7, dtype=torch.double)
        AllSum.order.clear()
        for _ in range(2):
            layers.zero_grad()
            if takes_loss:
                pipe(x, targets=target).backward()
            else:
                square(pipe(x), target).backward()
        order = list(AllSum.order)
        piped = [p.grad for p in layers.parameters()]
        layers.zero_grad()
        square(layers(x), target).backward()
        for mine, plain in zip(piped, layers.parameters(), strict=True):
            torch.testing.assert_close(mine, plain.grad, msg=f"{schedule} {mode}")
        results[schedule, mode] = order
        pipe.close()
    return results


@pytest.mark.distributed
def test_collectives_in_two_stages_run_in_one_order_on_every_rank():
    # With a thread per stage the collectives of two stages would meet each other.
    first, second = run_ranks(run_collectives, 2, timeout_s=DEADLINE_S)
    assert first == second
    calls = 2 * 2 * NUM_MICROBATCHES
    again = {"never": 0, "except_last": 3, "always": 4}
    for (_, mode), order in first.items():
        passes = [kind for kind, _ in order]
        assert passes.count("backward") == calls
        assert passes.count("forward") == calls + 2 * 2 * again[mode]
