"""The pipeline as an object: its attributes, layers, names, placement."""

import itertools

import pytest
import torch
from torch import nn

from pipetransformer.pipe import GPipe, Pipe, PipeSequential

from .models import dense, make_pipe, staged

CPU, META = torch.device("cpu"), torch.device("meta")


def mixed():
    return nn.Sequential(
        nn.Linear(5, 5),
        nn.Sequential(nn.BatchNorm1d(5), nn.ReLU()),
        nn.Linear(5, 5, device="meta"),
        nn.Tanh(),
    )


def test_devices_and_partitions_have_their_types():
    pipe = Pipe(mixed())
    assert type(pipe.devices) is list and pipe.devices == [CPU, CPU, META]
    assert type(pipe.partitions) is nn.ModuleList
    assert [type(stage) for stage in pipe.partitions] == [PipeSequential] * 3
    assert [len(stage) for stage in pipe.partitions] == [1, 2, 2]


def test_names_hold_stage_and_layer():
    pipe = Pipe(mixed())
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(pipe.state_dict()) == [
        "partitions.0.0.weight",
        "partitions.0.0.bias",
        *(f"partitions.1.0.{name}" for name in norm),
        "partitions.2.0.weight",
        "partitions.2.0.bias",
    ]
    assert {name for name, _ in pipe.named_parameters()} <= set(pipe.state_dict())


@pytest.mark.parametrize("make", [Pipe, lambda m: make_pipe(m, 2, 1)])
def test_len_index_and_iteration_go_over_layers(make):
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    pipe = make(layers)
    assert len(pipe) == 5
    assert [id(layer) for layer in pipe] == [id(layer) for layer in layers]
    for k in range(-5, 5):
        assert pipe[k] is layers[k]
    assert pipe[torch.tensor(2)] is layers[2]


def test_len_and_index_see_flattened_layers():
    pipe = Pipe(mixed())
    assert len(pipe) == 5 and type(pipe[2]) is nn.ReLU and type(pipe[-1]) is nn.Tanh


MAKERS = {
    "children": lambda m: Pipe(m, 2),
    "plan": lambda m: make_pipe(m, 2, 2),
    "GPipe": lambda m: GPipe(m, [2, 2], devices=[CPU, CPU]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_pipe_starts_in_the_mode_of_its_module(make):
    pipe = make(dense().eval())
    assert not any(module.training for module in pipe.modules())
    assert all(module.training for module in pipe.train().modules())
    layers = dense()
    layers[0].eval()
    pipe = make(layers)
    assert [layer.training for layer in pipe] != [True] * len(pipe)
    assert pipe.training and all(stage.training for stage in pipe.partitions)


@pytest.mark.parametrize("index", [2, -3, 10**30])
def test_index_outside_is_an_index_error(index):
    with pytest.raises(IndexError, match="expected one of 2 layers, got"):
        Pipe(staged(nn.ReLU(), nn.Tanh()))[index]


@pytest.mark.parametrize("index", [slice(0, 1), slice(None), "0", 0.0, None], ids=str)
def test_index_that_is_no_integer_is_a_type_error(index):
    with pytest.raises(TypeError, match="layer index: expected an integer, got"):
        Pipe(staged(nn.ReLU(), nn.Tanh()))[index]


def test_empty_pipeline_has_no_layers():
    pipe = Pipe(nn.Sequential())
    assert (len(pipe), list(pipe), pipe.devices) == (0, [], [])
    with pytest.raises(IndexError, match="expected one of 0 layers, got 0"):
        pipe[0]


def test_children_are_not_attributes():
    layers = nn.Sequential()
    layers.add_module("first", nn.Linear(2, 2))
    pipe = Pipe(layers)
    for name in ("first", "0", "weight"):
        with pytest.raises(AttributeError):
            getattr(pipe, name)


MOVES = {
    "cuda()": lambda m: m.cuda(),
    "cuda(1)": lambda m: m.cuda(1),
    "cpu()": lambda m: m.cpu(),
    "xpu()": lambda m: m.xpu(),
    "mtia()": lambda m: m.mtia(),
    "to_empty(device=cpu)": lambda m: m.to_empty(device="cpu"),
    "to(device)": lambda m: m.to(CPU),
    "to(index)": lambda m: m.to(0),
    "to(text)": lambda m: m.to("cpu"),
    "to(tensor)": lambda m: m.to(torch.rand(1)),
    "to(device, dtype)": lambda m: m.to("cpu", torch.half),
    "to(device=)": lambda m: m.to(device="cpu"),
    "to(device=, dtype=)": lambda m: m.to(dtype=torch.half, device=CPU),
    "to(tensor=)": lambda m: m.to(tensor=torch.rand(1)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_moving_is_refused_with_a_fresh_error(move):
    pipe = Pipe(mixed())
    errors = []
    for _ in range(2):
        with pytest.raises(TypeError, match="moving parameters and buffers") as caught:
            move(pipe)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert pipe.devices == [CPU, CPU, META]
    assert [p.device for p in pipe.parameters()] == [CPU] * 4 + [META] * 2
    assert {p.dtype for p in pipe.parameters()} == {torch.float32}


CASTS = {
    "half()": (lambda m: m.half(), torch.half),
    "float()": (lambda m: m.float(), torch.float),
    "double()": (lambda m: m.double(), torch.double),
    "bfloat16()": (lambda m: m.bfloat16(), torch.bfloat16),
    "to(dtype)": (lambda m: m.to(torch.double), torch.double),
    "to(dtype, flag)": (lambda m: m.to(torch.double, True), torch.double),
    "to(dtype=)": (lambda m: m.to(dtype=torch.double), torch.double),
    "to(device=None)": (lambda m: m.to(device=None, dtype=torch.half), torch.half),
}


@pytest.mark.parametrize("cast, dtype", CASTS.values(), ids=CASTS.keys())
def test_casting_is_allowed(cast, dtype):
    pipe = Pipe(mixed())
    assert cast(pipe) is pipe
    assert {p.dtype for p in pipe.parameters()} == {dtype}
    assert pipe.devices == [CPU, CPU, META]


def test_memory_format_may_change():
    pipe = Pipe(nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert pipe.to(memory_format=torch.channels_last) is pipe
    assert pipe[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_are_the_plain_models_and_an_optimizer_steps_them():
    layers = dense()
    pipe = Pipe(layers, 2, return_tensors=True)
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in layers.parameters()]
    before = [p.detach().clone() for p in layers.parameters()]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe(torch.randn(4, 5, dtype=torch.double)).square().sum().backward()
    optimizer.step()
    pairs = itertools.zip_longest(before, layers.parameters())
    assert all(not torch.equal(a, b) for a, b in pairs)
    pipe.close()
