"""Layers grouped and placed."""

import pytest
import torch
from torch import nn

from pipetransformer.pipe.partition import partition_model

from .models import dense


def test_groups_have_the_sizes_and_the_order():
    layers = dense(6)
    x = torch.randn(2, 5, dtype=torch.double)
    expected = layers(x)
    children = list(layers)
    grouped = partition_model(layers, [1, 3, 2], ["cpu"] * 4)
    assert type(grouped) is nn.Sequential
    assert [len(group) for group in grouped] == [1, 3, 2]
    flat = [layer for group in grouped for layer in group]
    assert all(a is b for a, b in zip(flat, children, strict=True))
    assert torch.equal(grouped(x), expected)


def test_groups_are_moved_to_their_devices():
    # CPU twin: meta stands for the other device.
    grouped = partition_model(dense(3), [1, 2], ["cpu", torch.device("meta")])
    devices = [{p.device.type for p in group.parameters()} for group in grouped]
    assert devices == [{"cpu"}, {"meta"}]


def test_default_devices_are_numbered(monkeypatch):
    places, layers = [], dense(3)
    monkeypatch.setattr(
        nn.Sequential, "to", lambda self, place: places.append(place) or self
    )
    partition_model(layers, [1, 1, 1])
    assert places == [0, 1, 2]


@pytest.mark.parametrize("balance", [[], [2], [1, 3], [3, 0], [4, -1]])
def test_balance_must_fit(balance):
    with pytest.raises(ValueError, match="positive numbers with the sum 3, got"):
        partition_model(dense(3), balance, ["cpu", "cpu"])


def test_each_group_needs_a_device():
    with pytest.raises(ValueError, match=r"one per group \(2\), got 1"):
        partition_model(dense(3), [1, 2], ["cpu"])
