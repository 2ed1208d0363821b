"""Small models and helpers shared by the tests of the pipe room."""

import copy

import torch
from torch import nn

from pipetransformer.pipe import Pipe, WithDevice

MODES = ("never", "except_last", "always")


class Functional(nn.Module):
    """A layer from a function; the function sees what forward sees."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def dense(num_layers=4, width=5, dtype=torch.double):
    layers = []
    for k in range(num_layers):
        layers.append(nn.Sequential(nn.Linear(width, width), nn.Tanh()))
        if k == 1:
            layers[-1].append(nn.LayerNorm(width))
    return nn.Sequential(*layers).to(dtype)


def linears(count):
    return [nn.Linear(5, 5, dtype=torch.double) for _ in range(count)]


def staged(*layers):
    """Layers that `Pipe` makes a stage of each, also those without parameters."""
    return nn.Sequential(*(WithDevice(layer, "cpu") for layer in layers))


def even_cuts(num_layers, num_stages):
    return [num_layers * k // num_stages for k in range(num_stages + 1)]


def make_pipe(layers, num_stages, num_microbatches, checkpoint="never", **options):
    return Pipe.from_plan(
        layers,
        cuts=even_cuts(len(layers), num_stages),
        num_microbatches=num_microbatches,
        checkpoint=checkpoint,
        **options,
    )


def grads(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_same_training(layers, pipe_of, x, loss=lambda y: (y**2).sum()):
    """Outputs, input gradient and parameter gradients equal the plain model's."""
    plain = copy.deepcopy(layers)
    a = x.detach().clone().requires_grad_(x.requires_grad)
    b = x.detach().clone().requires_grad_(x.requires_grad)
    pipe = pipe_of(layers)
    expected, actual = plain(a), pipe(b)
    torch.testing.assert_close(actual, expected)
    loss(expected).backward()
    loss(actual).backward()
    if x.requires_grad:
        torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(grads(layers), grads(plain))
    return pipe
