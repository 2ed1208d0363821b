"""torchgpipe's balancing: a tuple is one value for every layer."""

import pytest
import torch
from torch import nn

from pipetransformer.compat.torchgpipe.balance import balance_by_size, balance_by_time
from pipetransformer.compat.torchgpipe.balance.profile import profile_times
from tests.pipe.models import Functional

pytestmark = pytest.mark.compat


def swap(value):
    a, b = value
    return b, a


def test_tuples_are_not_spread():
    layers = nn.Sequential(*(Functional(swap) for _ in range(3)))
    sample = (torch.ones(2, 2), torch.ones(2, 3))
    balance = balance_by_time(2, layers, sample, timeout=0, device="cpu")
    assert sum(balance) == 3 and len(balance) == 2
    assert len(profile_times(layers, sample, 0.0, torch.device("cpu"))) == 3


def test_refusals():
    layers = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected a CUDA device, got cpu"):
        balance_by_size(1, layers, torch.ones(1, 2), device="cpu")
    with pytest.raises(ValueError, match=r"one cost per block \(2\), got 1"):
        balance_by_time(2, layers, torch.ones(1, 2), device="cpu")
