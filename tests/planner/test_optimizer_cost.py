"""What an optimizer's step takes is measured on copies, layer by layer."""

import copy
import dataclasses

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


def steps(model, optimizer):
    return [cost.step_ns for cost in _optimizer.optimizer_costs(model, optimizer)]


def state_of(model, optimizer):
    """Return the bytes of an optimizer's state by layer, as a step really leaves it."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [
        sum(
            value.nbytes
            for parameter in layer.parameters()
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        )
        for layer in model
    ]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_is_what_a_step_leaves(kind):
    make, options = OPTIMIZERS[kind]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    optimizer = make(model.parameters(), **options)
    found = profiled(model, optimizer)
    told = [layer.optimizer_bytes for layer in found.layers]
    expected = state_of(model, optimizer)
    if kind == "adagrad" and None in told:  # older ones step with a state alone
        expected = [None, 0, None]
    assert told == expected
    assert planner.Profile.from_json(found.to_json()) == found


def test_on_a_device_the_state_counts_and_no_step_is_timed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters())
    found = _optimizer.optimizer_costs(model, optimizer, device=torch.device("cpu"))
    assert found == [(0, state_of(model, optimizer)[0]), (0, 0)]


def test_a_copy_that_does_not_step_leaves_the_state_unknown(caplog):
    caplog.set_level("INFO")

    class Full(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("full")

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = _optimizer.optimizer_costs(model, Full(model.parameters(), lr=0.1))
    assert found == [(0, None), (0, 0)]
    assert "what Full takes for a layer is not measured: full" in caplog.text


def charged(profile, **told):
    """Return the bytes of both stages of two layers each."""
    cluster = planner.Cluster(devices_per_node=2, device_memory_bytes=2**30, **told)
    plan = planner.search(
        profile, cluster, global_batch=4, num_stages=2, num_microbatches=2
    )
    assert plan.cuts == (0, 2, 4)
    return list(plan.bytes_per_stage)


def test_a_plan_charges_what_was_measured_unless_the_cluster_says_otherwise():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    size = next(model.parameters()).nbytes
    found = profiled(model, torch.optim.SGD(model.parameters(), lr=0.1))
    times = "forward_ns", "input_grad_ns", "weight_grad_ns", "forward_only_ns"
    even = {**dict.fromkeys(times, (9,)), "optimizer_ns": 0}

    def of_each(state_bytes):
        layers = tuple(
            dataclasses.replace(each, **even, optimizer_bytes=state_bytes)
            for each in found.layers
        )
        return dataclasses.replace(found, layers=layers)

    none, some, unknown = (charged(of_each(n)) for n in (0, 3 * size, None))
    assert [b - a for a, b in zip(none, some, strict=True)] == [6 * size] * 2
    assert [b - a for a, b in zip(none, unknown, strict=True)] == [4 * size] * 2
    for state_bytes in (0, 3 * size, None):
        told = charged(of_each(state_bytes), optimizer_bytes_per_parameter_byte=3)
        assert told == some


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

    def cost(optimizer, groups, device):
        timed.append([tuple(p.shape) for g in groups for p in g["params"]])
        return _optimizer.OptimizerCost(len(timed), 0)

    monkeypatch.setattr(_optimizer, "_cost", cost)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4)]
    model = nn.Sequential(*layers)
    head = set(layers[1].parameters())
    groups = [
        {"params": [p for p in model.parameters() if p not in head]},
        {"params": list(head), "lr": 1.0},
    ]
    times = steps(model, torch.optim.AdamW(groups))
    assert times == [1, 2, 3, 4], "another group is other work"
    times = steps(model, torch.optim.AdamW(model.parameters()))
    assert times == [5, 5, 6, 7]


def test_a_shared_parameter_counts_in_its_first_layer_and_a_frozen_one_nowhere():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    third = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(first, second, third)
    trained = [p for p in model.parameters() if p.requires_grad]
    times = steps(model, torch.optim.SGD(trained, lr=0.1))
    assert times[0] > 0 and times[1] > 0 and times[2] == 0


def test_an_optimizer_that_is_not_torchs_own_is_not_tried():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError("a step of an unknown optimizer may do anything")

    model = nn.Sequential(nn.Linear(4, 4))
    found = profiled(model, Own(model.parameters(), lr=0.1))
    assert found.layers[0].optimizer_ns == 0
