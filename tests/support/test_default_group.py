"""The users' group of the tests ends after its models, or says who is left."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.default_group import default_group
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _train():
    model = DistributedDataParallel(nn.Linear(2, 1))
    model.itself = [model]  # only the collector ends it
    model(torch.ones(1, 2)).sum().backward()
    return model


def _end_groups(rank):
    with default_group(rank, 2):
        _train()
    with pytest.raises(RuntimeError, match="expected no model left, got 1"):
        with default_group(rank, 2):
            kept = _train()
    assert kept is not None
    return torch.distributed.is_initialized()


def test_models_end_before_the_group_or_are_named():
    assert run_ranks(_end_groups, 2) == [True, True]
