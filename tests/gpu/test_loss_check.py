"""The check of a loss leaves a device's generator as the loss left it."""

import logging

import pytest
import torch
from torch.nn import functional

from pipetransformer.loop.loss_check import checked_loss

from .devices import CPU, cuda

every_device = pytest.mark.parametrize("devices", [CPU, cuda()])


def generator_of(device):
    return torch if device == "cpu" else torch.get_device_module(device)


def batch(device):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(5, 3, generator=generator).to(device).requires_grad_()
    return outputs, torch.randint(3, (5,), generator=generator).to(device)


def noisy(outputs, targets):
    noise = torch.rand(len(outputs), 1, device=outputs.device)
    return functional.cross_entropy(outputs + noise, targets) + noise.sum()


@every_device
def test_a_loss_that_draws_on_its_device_is_named_and_draws_once(devices, caplog):
    (device,) = devices
    values, states = [], []
    for call in (checked_loss, lambda loss, *args: loss(*args)):
        generator_of(device).manual_seed(7)
        with caplog.at_level(logging.WARNING):
            values.append(call(noisy, *batch(device)).item())
        states.append(generator_of(device).get_rng_state())
    assert values[0] == values[1]
    assert torch.equal(*states)
    assert [r.message for r in caplog.records] == [
        "loss: not checked to be a mean over rows: it draws random numbers"
    ]
