"""Copies of a pipeline, by deepcopy and by pickle, live on their own."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, WithDevice, Workers
from pipetransformer.pipe.skip import pop, skippable, stash

from .models import MODES, dense, grads, make_pipe, staged

X = torch.randn(6, 5, dtype=torch.double, generator=torch.manual_seed(1))
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pipe: pickle.loads(pickle.dumps(pipe)),
}
both_ways = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


@skippable(stash="early")
class Stash(nn.Module):
    def forward(self, x):
        yield stash("early", x)
        return x.sin()


@skippable(pop="early")
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("early"))


def model():
    layers = dense(3)
    layers[2][0].weight = layers[0][0].weight  # stays one parameter
    last = nn.Sequential(Stash(), Noisy(), Pop())
    return nn.Sequential(*layers, WithDevice(last, "cpu"))


MAKERS = {
    "children": lambda mode: Pipe(model(), 3, mode, return_tensors=True),
    "plan": lambda mode: make_pipe(model(), 2, 3, mode, seed=5),
}


@both_ways
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("called", [True, False], ids=["called", "fresh"])
def test_copy_gives_the_same_outputs(duplicate, mode, make, called):
    pipe = make(mode)
    if called:
        pipe(X).sum().backward()  # an engine and threads are there
        pipe.zero_grad()
    other = duplicate(pipe)
    outputs = []
    for each in (pipe, other):
        torch.manual_seed(3)
        outputs.append(each(X))
    assert torch.equal(*outputs)
    for each, output in zip((pipe, other), outputs, strict=True):
        output.square().sum().backward()
        each.close()
    torch.testing.assert_close(grads(other), grads(pipe))


@both_ways
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_copy_trains_on_its_own(duplicate, make):
    pipe = make("except_last")
    other = duplicate(pipe)
    before = [p.detach().clone() for p in pipe.parameters()]
    assert len(before) == len(list(other.parameters()))  # the shared one is shared
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(X).square().sum().backward()
    optimizer.step()
    for p, q, old in zip(pipe.parameters(), other.parameters(), before, strict=True):
        assert p.grad is None and torch.equal(p, old) and not torch.equal(q, old)
    other.close()


@both_ways
def test_copy_keeps_what_the_pipeline_was_told(duplicate):
    layers = staged(nn.Sequential(nn.Linear(5, 5)), nn.ReLU())
    pipe = Pipe(layers, 3, "always")
    pipe.eval()
    other = duplicate(pipe)
    assert (other.chunks, other.checkpoint, other.training) == (3, "always", False)
    assert other.devices == pipe.devices and other.devices is not pipe.devices
    assert [stage.plain_names for stage in other.partitions] == [("0.0",), ("1",)]
    assert not other.return_tensors and len(other) == 2
    assert other(torch.ones(2, 5)).local_value().shape == (2, 5)
    other.close()


def mean_square(output, targets):
    return ((output - targets) ** 2).mean()


@both_ways
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_copy_keeps_schedule_loss_and_dispatch(duplicate, schedule):
    pipe = Pipe(dense(2), 3, schedule=schedule, loss=mean_square, dispatch="serial")
    other = duplicate(pipe)
    assert (other.schedule, other.current_dispatch()) == (schedule, "serial")
    for each in (pipe, other):
        each(X, targets=X).backward()
        each.close()
    torch.testing.assert_close(grads(other), grads(pipe))


@both_ways
def test_copy_makes_threads_of_its_own(duplicate):
    with Workers(2) as workers:
        pipe = make_pipe(dense(), 2, 2, workers=workers)
        expected = pipe(X)
        other = duplicate(pipe)
    torch.testing.assert_close(other(X), expected)  # the shared ones are closed
    other.close()
