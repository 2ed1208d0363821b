"""A parameter that a stage uses more than once: its gradient is a sum per cell."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipetransformer.pipe import Pipe
from pipetransformer.pipe.trace import take_cells, trace_cells

from .models import MODES, Functional, grads, staged

NUM_MICROBATCHES = 5
WIDTH = 16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        state = torch.zeros_like(x)
        for k in range(4):
            state = self.cell(x.roll(k, 1), state)
        return state


class Kept(nn.Module):
    """Hands a parameter on, and uses it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x):
        return torch.tanh(x * self.scale) * self.scale.exp()


class Ordinary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


REPEATED = [Tied, Recurrent, Kept]


def model(kind):
    torch.manual_seed(0)
    return staged(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 3))


def train(layers, mode, dispatch):
    torch.manual_seed(1)
    x = torch.randn(20, WIDTH, requires_grad=True)
    pipe = Pipe(layers, NUM_MICROBATCHES, mode, dispatch=dispatch, return_tensors=True)
    output = pipe(x)
    output.square().mean().backward(retain_graph=True)
    seen = [x.grad.clone(), *grads(layers)]
    output.sum().backward()
    pipe.close()
    return [*seen, x.grad, *grads(layers)]


def assert_same_bits(mine, other):
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*REPEATED, Ordinary])
def test_bits_are_those_of_every_dispatch_and_mode(kind, mode):
    layers = model(kind)
    threads = train(copy.deepcopy(layers), "never", "threads")
    assert_same_bits(train(copy.deepcopy(layers), mode, "serial"), threads)
    assert_same_bits(train(copy.deepcopy(layers), mode, "threads"), threads)
    with profile(activities=[ProfilerActivity.CPU]):
        profiled = train(layers, mode, "serial")
    assert_same_bits(profiled, threads)


@pytest.mark.parametrize("kind", REPEATED)
def test_uses_in_several_layers_of_one_stage_count_too(kind):
    layer = kind()
    layers = staged(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(layer, nn.Tanh(), layer), Functional(abs)
    )
    threads = train(copy.deepcopy(layers), "never", "threads")
    assert_same_bits(train(layers, "never", "serial"), threads)


def num_autograd_calls(layers):
    pipe = Pipe(layers, NUM_MICROBATCHES, "never", dispatch="serial")
    output = pipe(torch.randn(20, WIDTH)).local_value()
    trace_cells(100)
    try:
        output.sum().backward()
        cells, _ = take_cells()
    finally:
        trace_cells(0)
        take_cells()
    assert {cell[0] for cell in cells} == {"B"}
    return len(cells)


def test_one_call_of_autograd_runs_all_where_nothing_is_used_twice():
    assert num_autograd_calls(model(Ordinary)) == 1


@pytest.mark.parametrize("kind", REPEATED)
def test_one_call_of_autograd_runs_a_micro_batch_where_something_is(kind):
    assert num_autograd_calls(model(kind)) == NUM_MICROBATCHES


class Cached(nn.Module):
    """Makes its weight once for all micro-batches, as parametrize.cached() does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.made = None

    def forward(self, x):
        if self.made is None:
            self.made = self.weight * self.weight
        return x @ self.made


def test_micro_batches_that_share_a_graph_still_go_backward_together():
    layers = model(Cached)
    x = torch.randn(20, WIDTH)
    plain = copy.deepcopy(layers)
    plain(x).square().sum().backward()
    pipe = Pipe(layers, NUM_MICROBATCHES, "never", dispatch="serial")
    pipe(x).local_value().square().sum().backward()
    torch.testing.assert_close(grads(layers), grads(plain))
