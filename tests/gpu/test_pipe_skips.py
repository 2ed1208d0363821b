"""Skips and deferred batch norm on CUDA devices, as many as there are."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import GPipe, Pipe
from tests.pipe.models import MODES, grads
from tests.pipe.test_batchnorm import assert_statistics
from tests.pipe.test_pipe_skips import batch, chain

pytestmark = pytest.mark.gpu


def devices(count):
    return [f"cuda:{k % torch.cuda.device_count()}" for k in range(count)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [[0, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]], ids=str)
def test_skips_cross_devices_with_the_plain_models_gradients(mode, cuts):
    plain = chain()
    layers = copy.deepcopy(plain)
    places = [torch.device(name) for name in devices(len(cuts) - 1)]
    for a, b, place in zip(cuts, cuts[1:], places, strict=False):
        layers[a:b].to(place)
    pipe = Pipe.from_plan(
        layers, cuts=cuts, num_microbatches=3, checkpoint=mode, devices=places
    )
    x = batch()
    on_device = x.detach().to(places[0]).requires_grad_()
    output, expected = pipe(on_device), plain(x)
    torch.testing.assert_close(output.cpu(), expected)
    (output**2).sum().backward()
    (expected**2).sum().backward()
    torch.testing.assert_close(on_device.grad.cpu(), x.grad)
    torch.testing.assert_close([g.cpu() for g in grads(layers)], grads(plain))


def test_gpipe_places_its_stages_on_all_devices():
    plain = chain()
    model = GPipe(copy.deepcopy(plain), [2, 3], devices=devices(2), chunks=2)
    x = batch().detach()
    torch.testing.assert_close(model(x.to(model.devices[0])).cpu(), plain(x))


@pytest.mark.parametrize("mode", MODES)
def test_deferred_statistics_stay_on_the_device(mode):
    layers = nn.Sequential(nn.BatchNorm1d(4).double(), nn.ReLU()).cuda()
    plain = copy.deepcopy(layers[0]).cpu()
    x = batch().detach()
    Pipe(layers, 4, mode, True)(x.cuda()).local_value().sum().backward()
    norm = layers[0]
    assert {b.device.type for b in norm.buffers()} == {"cuda"}
    plain(x)
    assert_statistics(norm.cpu(), plain, x)
