"""Failures of every kind, in every pass, reach the caller; the pipe stays usable."""

import copy
import threading

import pytest
import torch
from torch import nn

from pipetransformer.pipe import is_recomputing

from .models import Functional, grads, linears, make_pipe

DEADLINE_S = 60
ERRORS = (KeyError("a", 3), SystemExit(7), KeyboardInterrupt("stop"))
PASSES = ("forward", "recomputation", "backward")
DISPATCHES = ("serial", "threads")
every_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)


class Failing(nn.Module):
    """Fails in one pass of one micro-batch while armed."""

    def __init__(self, error, in_pass, microbatch):
        super().__init__()
        self.error, self.in_pass, self.microbatch = error, in_pass, microbatch
        self.armed = True

    def fail(self, in_pass):
        if self.armed and in_pass == self.in_pass:
            raise self.error

    def forward(self, x):
        layer = self
        here = int(x.detach()[0, 0].item()) == self.microbatch

        class Pass(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                if here:
                    layer.fail("recomputation" if is_recomputing() else "forward")
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                if here:
                    layer.fail("backward")
                return grad

        return Pass.apply(x)


def numbered(rows=4):
    """Inputs whose first column is the micro-batch, untouched by the layers."""
    x = torch.randn(rows, 5, dtype=torch.double)
    x[:, 0] = torch.arange(rows)
    return x


class KeepNumber(nn.Linear):
    """A linear layer that leaves the first column alone."""

    def __init__(self):
        super().__init__(5, 4, dtype=torch.double)

    def forward(self, x):
        return torch.cat([x[:, :1], super().forward(x)], 1)


def mean_square(output, target):
    return (output[:, 1:] ** 2 * target).mean()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("in_pass", PASSES)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@every_dispatch
def test_failure_keeps_its_identity_and_the_next_call_works(
    error, in_pass, stage, schedule, dispatch
):
    layers = nn.Sequential(*[KeepNumber() for _ in range(3)])
    failing = Failing(error, in_pass, 1)
    staged = nn.Sequential(*layers)
    staged[stage] = nn.Sequential(layers[stage], failing)
    takes_loss = schedule != "gpipe"
    pipe = make_pipe(
        staged,
        3,
        4,
        "always",
        dispatch=dispatch,
        schedule=schedule,
        loss=mean_square if takes_loss else None,
    )
    x, target = numbered(), torch.ones(4, 1, dtype=torch.double)

    def step():
        if takes_loss:
            pipe(x, targets=target).backward()
        else:
            mean_square(pipe(x), target).backward()

    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            step()
        assert caught.value is error and caught.value.args == error.args
        assert any(entry.name == "fail" for entry in caught.traceback)
        assert not is_recomputing()
    failing.armed = False
    layers.zero_grad()
    step()
    pipe.close()
    plain = copy.deepcopy(layers)
    plain.zero_grad()
    mean_square(plain(x), target).backward()
    torch.testing.assert_close(grads(layers), grads(plain))


@every_dispatch
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_failing_last_stage_ends_the_first_at_the_failing_clock(dispatch, num_stages):
    # The first stage is slow: it is in its call when the last stage has failed.
    failed = threading.Event()
    calls = []

    def first(x):
        i = int(x[0, 0].item())
        if dispatch == "threads" and i == num_stages:
            raise AssertionError("a cell of a later clock was started")
        if dispatch == "threads" and i == num_stages - 1:
            assert failed.wait(DEADLINE_S)  # due at the failing clock: runs to its end
        calls.append(i)
        return x

    def last(x):
        failed.set()
        raise ValueError("last stage")

    middle = [nn.Identity() for _ in range(num_stages - 2)]
    layers = nn.Sequential(Functional(first), *middle, Functional(last))
    pipe = make_pipe(layers, num_stages, 3 * num_stages, dispatch=dispatch)
    for _ in range(2):
        failed.clear()
        calls.clear()
        with pytest.raises(ValueError, match="last stage"):
            pipe(torch.arange(3.0 * num_stages)[:, None])
        # Cell (0, n - 1) has clock n - 1, as has (n - 1, 0).
        assert calls == list(range(num_stages))
    pipe.close()


@every_dispatch
def test_lowest_clock_then_lowest_stage_is_the_one_raised(dispatch):
    def fail(name, microbatch):
        def fn(x):
            if int(x[0, 0].item()) == microbatch:
                raise ValueError(name)
            return x

        return Functional(fn)

    def layers(*rules):
        return nn.Sequential(*[fail(*rule) for rule in rules])

    x = torch.arange(4.0)[:, None]
    for rules, expected in [
        ([("a", 2), ("b", 1), ("c", 0)], "a"),  # all of clock 2
        ([("a", 3), ("b", 1), ("c", 1)], "b"),  # clocks 3, 2 and 3
        ([("a", 9), ("b", 3), ("c", 1)], "c"),  # clocks none, 4 and 3
    ]:
        pipe = make_pipe(layers(*rules), 3, 4, dispatch=dispatch)
        for _ in range(3):
            with pytest.raises(ValueError) as caught:
                pipe(x)
            assert str(caught.value) == expected
        pipe.close()


@every_dispatch
def test_failing_stage_delivers_no_gradient_below_it(dispatch):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("cell")

    layers = nn.Sequential(*linears(2))
    staged = nn.Sequential(nn.Sequential(Functional(Fail.apply), layers[0]), layers[1])
    pipe = make_pipe(staged, 2, 3, dispatch=dispatch)
    x = torch.randn(6, 5, dtype=torch.double, requires_grad=True)
    loss = pipe(x).sum()
    with pytest.raises(ValueError, match="cell"):
        loss.backward()
    assert x.grad is None and layers[0].weight.grad is None
    pipe.close()
