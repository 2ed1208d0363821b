"""Balancing by memory and time on a CUDA device."""

import pytest
import torch
from torch import nn

from pipetransformer.pipe.balance import balance_by_size, balance_by_time
from tests.pipe.models import Functional

pytestmark = pytest.mark.gpu


def test_size_isolates_the_layer_that_keeps_most():
    def expand(x):
        return x.repeat(1, 1000).sigmoid().sum(1, keepdim=True).expand_as(x) * 1

    layers = nn.Sequential(*(Functional(torch.relu) for _ in range(3)))
    layers.insert(1, Functional(expand))
    x = torch.ones(64, 4096, device="cuda")
    assert balance_by_size(3, layers, x, chunks=2) == [1, 1, 2]


def test_parameters_count_by_their_scale():
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)), nn.ReLU())
    x = torch.ones(4, 512)
    assert balance_by_size(3, layers, x, param_scale=100.0) == [1, 1, 2]
    assert all(p.device.type == "cpu" for p in layers.parameters())


def test_time_runs_on_the_device():
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    balance = balance_by_time(2, layers, torch.ones(4, 8), timeout=0.1)
    assert sum(balance) == 3
    assert all(p.device.type == "cpu" for p in layers.parameters())
