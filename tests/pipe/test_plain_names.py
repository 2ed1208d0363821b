"""A pipeline's state loads in the plain Sequential, and back in any cut."""

import collections
import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import (
    GPipe,
    Pipe,
    WithDevice,
    from_plain_state_dict,
    partition_model,
    to_plain_state_dict,
)
from pipetransformer.pipe.skip import pop, skippable, stash

from .models import linears, make_pipe


@skippable(stash="early")
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5, dtype=torch.double)

    def forward(self, x):
        yield stash("early", x)
        return self.inner(x)


@skippable(pop="early")
class Pop(nn.Module):
    def forward(self, x):
        early = yield pop("early")
        return x + early


def model(wrap=lambda layer: layer):
    named = collections.OrderedDict(
        stem=nn.Sequential(*linears(2), nn.Sequential(*linears(1))),
        skip=Stash(),
        norm=nn.BatchNorm1d(5, dtype=torch.double),
        block=nn.Sequential(collections.OrderedDict(a=Pop(), b=linears(1)[0])),
        head=wrap(linears(1)[0]),
    )
    return nn.Sequential(named)


# Each takes the layers and makes a pipeline of another number of stages.
PIPES = {
    "children": lambda m: Pipe(m, 2),
    "one stage": lambda m: make_pipe(m, 1, 1),
    "two stages": lambda m: make_pipe(m, 2, 1),
    "four stages": lambda m: make_pipe(m, 4, 1),
    "GPipe": lambda m: GPipe(m, [2, 3], devices=["cpu", "cpu"]),
}


def same(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("make", PIPES.values(), ids=PIPES.keys())
def test_state_of_a_pipe_loads_in_the_plain_sequential(make):
    plain = model()
    trained = copy.deepcopy(plain)
    pipe = make(trained)
    with torch.no_grad():
        for value in pipe.state_dict().values():
            value += 1
    state = to_plain_state_dict(pipe, pipe.state_dict())
    plain.load_state_dict(state, strict=True)
    same(plain.state_dict(), trained.state_dict())
    assert "stem.2.0.weight" in state and "skip.module.inner.weight" in state


@pytest.mark.parametrize("source", PIPES)
@pytest.mark.parametrize("target", PIPES)
def test_round_trip_over_different_stage_counts(source, target):
    first = PIPES[source](model())
    second = PIPES[target](model())
    plain = to_plain_state_dict(first, first.state_dict())
    second.load_state_dict(from_plain_state_dict(second, plain), strict=True)
    same(to_plain_state_dict(second, second.state_dict()), plain)
    same(
        from_plain_state_dict(first, to_plain_state_dict(first, first.state_dict())),
        first.state_dict(),
    )


def test_with_device_leaves_no_name():
    layers = model(lambda layer: WithDevice(layer, "cpu"))
    values = [value.clone() for value in layers.state_dict().values()]
    placed, plain = Pipe(layers, 2), model()
    plain.load_state_dict(to_plain_state_dict(placed, placed.state_dict()))
    assert all(map(torch.equal, plain.state_dict().values(), values))
    assert len(plain.state_dict()) == len(values)


@pytest.mark.parametrize("make", PIPES.values(), ids=PIPES.keys())
def test_unknown_and_missing_names_are_refused(make):
    pipe = make(model())
    state = pipe.state_dict()
    state["partitions.0.9.bias"] = state.pop(next(iter(state)))
    text = r"pipeline's state: .* unknown \['partitions.0.9.bias'\] and missing \['part"
    with pytest.raises(ValueError, match=text):
        to_plain_state_dict(pipe, state)
    plain = pipe.state_dict()
    with pytest.raises(ValueError, match=r"plain state: .* unknown .* missing \['stem"):
        from_plain_state_dict(pipe, plain)


def test_changed_stage_is_refused():
    pipe = Pipe(nn.Sequential(*linears(2)))
    pipe.partitions[1].append(nn.ReLU())
    with pytest.raises(ValueError, match="stage 1: expected the 1 layers .* got 2"):
        to_plain_state_dict(pipe, pipe.state_dict())


def test_versions_of_modules_are_kept():
    pipe = Pipe(model(), 2)
    plain = model().state_dict()
    renamed = to_plain_state_dict(pipe, pipe.state_dict())
    expected = {name: v for name, v in plain._metadata.items() if name in ("norm",)}
    assert expected["norm"]["version"] == 2
    assert {name: renamed._metadata[name] for name in expected} == expected
    assert set(renamed._metadata) == set(plain._metadata) - {"", "stem", "block"}
    back = from_plain_state_dict(pipe, renamed)
    own = pipe.state_dict()._metadata
    assert all(own[name] == version for name, version in back._metadata.items())
    assert "partitions.2.0" in back._metadata


def test_values_may_be_anything():
    pipe = Pipe(nn.Sequential(*linears(1)))
    moments = {"partitions.0.0.weight": 1, "partitions.0.0.bias": "two"}
    renamed = to_plain_state_dict(pipe, moments)
    assert renamed == {"0.weight": 1, "0.bias": "two"}
    assert from_plain_state_dict(pipe, renamed) == moments


def test_state_under_other_names_is_refused_with_what_renames_it():
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3))
    state = copy.deepcopy(layers.state_dict())
    pipe = Pipe(layers)
    with pytest.raises(RuntimeError, match=r"from_plain_state_dict\(pipe, state\)"):
        pipe.load_state_dict(state)
    # An old checkpoint of two devices: its cuts around the same layers.
    of_two = {
        "partitions.0.0.weight": torch.zeros(3, 3),
        "partitions.0.0.bias": torch.zeros(3),
        "partitions.1.0.weight": torch.ones(3, 3),
        "partitions.1.0.bias": torch.ones(3),
        "partitions.1.1.weight": torch.ones(3, 3),
        "partitions.1.1.bias": torch.ones(3),
    }
    with pytest.raises(RuntimeError, match="other cuts.*partition_model"):
        pipe.load_state_dict(of_two)
    Pipe(partition_model(layers, [2, 2], devices=["cpu", "cpu"])).load_state_dict(
        of_two
    )
    assert [layers[k].bias.sum() for k in (0, 2, 3)] == [0, 3, 3]
    wrong_shape = {**pipe.state_dict(), "partitions.0.0.bias": torch.zeros(4)}
    with pytest.raises(RuntimeError) as caught:
        pipe.load_state_dict(wrong_shape)
    assert "other names" not in str(caught.value)
