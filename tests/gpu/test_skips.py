"""Skip connections over stages on one to three devices."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, PipeSequential
from tests.pipe.models import MODES
from tests.pipe.skips import Pop, Stash

from .devices import CPU, cuda, own_streams_of, place, spread

CUTS = ([0, 1, 2, 4], [0, 2, 3, 4], [0, 1, 3, 4])


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [CPU, cuda(), cuda(2), cuda(3)])
def test_skips_over_three_stages_train_as_the_plain_model(devices, mode, cuts):
    x = torch.randn(9, 4, dtype=torch.double)
    for own_streams in own_streams_of(devices[0]):
        layers = nn.Sequential(
            Stash(), nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), Pop()
        )
        plain = PipeSequential(*copy.deepcopy(layers))
        places = spread(devices, 3)
        place(layers, cuts, places)
        pipe = Pipe.from_plan(
            layers,
            cuts=cuts,
            num_microbatches=4,
            checkpoint=mode,
            devices=places,
            own_streams=own_streams,
        )
        a, b = x.clone().requires_grad_(), x.to(devices[0]).requires_grad_()
        expected, actual = plain(a), pipe(b)
        torch.testing.assert_close(actual.cpu(), expected)
        (expected**2).sum().backward()
        (actual**2).sum().backward()
        torch.testing.assert_close(b.grad.cpu(), a.grad)
        for mine, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
