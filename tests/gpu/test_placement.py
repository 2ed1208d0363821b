"""Devices of stages: what is refused, merged and moved."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, WithDevice
from tests.pipe.models import MODES, grads, linears

from .devices import CPU, cuda

TWO = "distinct devices"


@pytest.mark.parametrize("devices", [pytest.param(["meta"], id="meta-twin"), cuda()])
def test_child_with_parameters_on_two_devices_is_refused(devices):
    child = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(devices[0]))
    with pytest.raises(
        ValueError, match="should have all parameters on a single device"
    ):
        Pipe(nn.Sequential(child, nn.Linear(2, 2)))


def shared_weight(first, second):
    layers = nn.Sequential(*linears(2))
    layers[0].to(first)
    layers[1].to(second)
    layers[1].weight = layers[0].weight
    return layers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_parameter_shared_on_one_device_trains(devices, mode):
    layers = shared_weight(devices[0], devices[0])
    plain = copy.deepcopy(layers)
    x = torch.randn(8, 5, dtype=torch.double, device=devices[0])
    pipe = Pipe(layers, 4, mode, return_tensors=True)
    pipe(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(grads(layers), grads(plain))


@pytest.mark.parametrize(
    "devices", [pytest.param(["cpu", "meta"], id="meta-twin"), cuda(2)]
)
def test_parameter_shared_by_two_devices_is_refused(devices):
    layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    layers[0].to(devices[0])
    layers[1].to(devices[1])
    both = nn.Parameter(torch.zeros(5, device=devices[0]))
    layers[0].bias = both
    inner = nn.Module()
    inner.weight = both
    inner.forward = lambda x: x
    there = WithDevice(inner, torch.device(devices[1]))
    with pytest.raises(ValueError, match=TWO):
        Pipe(nn.Sequential(layers[0], layers[1], there))


@pytest.mark.parametrize(
    ("devices", "wrong"),
    [
        pytest.param(["cpu"], "meta", id="cpu-twin"),
        pytest.param(["cuda:0"], "cpu", id="1-gpu", marks=pytest.mark.gpu),
    ],
)
def test_input_on_another_device_is_refused(devices, wrong):
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(devices[0]))
    with pytest.raises(
        ValueError,
        match="All inputs should be on the same device as the first partition",
    ):
        pipe(torch.zeros(4, 2, device=wrong))


@pytest.mark.parametrize("devices", [pytest.param(["meta"], id="meta-twin"), cuda()])
def test_neighbours_on_one_device_form_one_stage(devices):
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).to(devices[0])
    pipe = Pipe(layers, chunks=2, return_tensors=True)
    assert [len(stage) for stage in pipe.partitions] == [3]
    assert pipe.devices == [torch.device(devices[0])]
    assert pipe(torch.zeros(4, 2, device=devices[0])).device == pipe.devices[0]


@pytest.mark.parametrize("devices", [cuda(2)])
def test_with_device_places_and_merges_layers(devices):
    first, second = devices
    layers = nn.Sequential(
        nn.Linear(3, 3).to(first),
        WithDevice(nn.ReLU(), second),
        WithDevice(nn.Linear(3, 3), second),
        WithDevice(nn.Linear(3, 3), first),
    )
    pipe = Pipe(layers, chunks=2, return_tensors=True)
    assert [str(device) for device in pipe.devices] == [first, second, first]
    assert [len(stage) for stage in pipe.partitions] == [1, 2, 1]
    x = torch.randn(4, 3, device=first, requires_grad=True)
    y = pipe(x)
    assert str(y.device) == first
    y.sum().backward()
    assert str(x.grad.device) == first
    devices_of_grads = {str(p.grad.device) for p in pipe.parameters()}
    assert devices_of_grads == {first, second}
