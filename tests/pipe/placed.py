"""What the tests on the pretended accelerator share: models, places, steps."""

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, PipeSequential
from tests.support.fake_device import COMPILER
from tests.support.fake_device import place as place_layers

from .models import Functional

MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]
TIMEOUT_S = 100
CUTS = [0, 2, 4, 6]
PLACES = (
    ("fake:0", "fake:0", "fake:0"),
    ("fake:0", "fake:1", "fake:2"),
    ("fake:0", "fake:0", "fake:1"),
    ("fake:0", "fake:1", "fake:0"),
    ("cpu", "fake:0", "cpu"),
    ("fake:0", "cpu", "fake:1"),
)


def fork(x):
    """A tuple of a shifted view, integers and a tensor of its own."""
    y = torch.tanh(x)
    return y.view(-1, 2, 3)[:, 1:].squeeze(1), (x > 0).long(), y * 2


def join(part, positive, y):
    return torch.cat([part * 3, y[:, :3] * positive[:, :3]], 1)


def make_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Functional(fork), Functional(join)]
    layers += [nn.Linear(6, 6), Functional(fork), Functional(join)]
    return nn.Sequential(*layers).double()


def plain_model():
    return PipeSequential(*make_layers())


def make_pipe(places, mode="never", num_microbatches=4, **options):
    layers = place_layers(make_layers(), CUTS, places)
    return Pipe.from_plan(
        layers,
        cuts=CUTS,
        num_microbatches=num_microbatches,
        checkpoint=mode,
        devices=[torch.device(place) for place in places],
        **options,
    )


def train(model, x, steps=2):
    """Two steps; gradients and input gradient of the last, on CPU."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        model.zero_grad()
        (model(x) ** 2).sum().backward()
    return [x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]


def rows(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(9, 6, dtype=torch.double, generator=generator).to(device)
