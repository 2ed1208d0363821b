"""What an optimizer's step takes is measured on copies, layer by layer."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer import planner
from pipetransformer.planner import _optimizer


def profiled(model, optimizer):
    sample = torch.randn(4, 4)
    return planner.profile(
        model, sample, microbatch_samples=(2,), repeats=1, optimizer=optimizer
    )


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adafactor"])
def test_neither_weights_nor_the_optimizer_are_touched(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad.clone() for p in model.parameters()]
    found = profiled(model, optimizer)
    assert [layer.optimizer_ns > 0 for layer in found.layers] == [True, False, True]
    assert str(model.state_dict()) == str(before[0])
    assert str(optimizer.state_dict()) == str(before[1])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert planner.Profile.from_json(found.to_json()) == found


def test_layers_of_equal_parameters_are_timed_once(monkeypatch):
    timed = []

    def time(optimizer, groups):
        timed.append([tuple(p.shape) for g in groups for p in g["params"]])
        return len(timed)

    monkeypatch.setattr(_optimizer, "_time", time)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4)]
    model = nn.Sequential(*layers)
    head = set(layers[1].parameters())
    groups = [
        {"params": [p for p in model.parameters() if p not in head]},
        {"params": list(head), "lr": 1.0},
    ]
    times = _optimizer.time_optimizer(model, torch.optim.AdamW(groups))
    assert times == [1, 2, 3, 4], "another group is other work"
    times = _optimizer.time_optimizer(model, torch.optim.AdamW(model.parameters()))
    assert times == [5, 5, 6, 7]


def test_a_shared_parameter_counts_in_its_first_layer_and_a_frozen_one_nowhere():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    third = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(first, second, third)
    trained = [p for p in model.parameters() if p.requires_grad]
    times = _optimizer.time_optimizer(model, torch.optim.SGD(trained, lr=0.1))
    assert times[0] > 0 and times[1] > 0 and times[2] == 0


def test_an_optimizer_that_is_not_torchs_own_is_not_tried():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError("a step of an unknown optimizer may do anything")

    model = nn.Sequential(nn.Linear(4, 4))
    found = profiled(model, Own(model.parameters(), lr=0.1))
    assert found.layers[0].optimizer_ns == 0
