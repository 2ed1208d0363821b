"""Which cells are checkpointed, and when they are run again."""

import threading

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, is_checkpointing, is_recomputing, strict

from .models import MODES, Functional, linears, make_pipe

DEADLINE_S = 60
DISPATCHES = ("serial", "threads")
every_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)


class Logged(torch.autograd.Function):
    """Notes its passes: forward, recompute, backward of a micro-batch."""

    @staticmethod
    def forward(ctx, x, log, stage):
        ctx.cell, ctx.log = (int(x[0, 0].item()), stage), log
        log.append(("recompute" if is_recomputing() else "forward", *ctx.cell))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(("backward", *ctx.cell))
        return grad, None, None


def logged(log, stage=0):
    return Functional(lambda x: Logged.apply(x, log, stage))


def rows(count):
    return torch.arange(float(count))[:, None].requires_grad_()


@pytest.fixture
def rpc_agent(monkeypatch):
    monkeypatch.setattr(
        "torch.distributed.rpc.api._is_current_rpc_agent_set", lambda: True
    )


@pytest.fixture
def switch(rpc_agent):
    yield strict.set_strict
    strict.set_strict(False)


@pytest.mark.parametrize(
    "is_strict, num_rows, expected",
    [
        (False, 2, 1),
        (False, 4, 3),
        (False, 1, 0),
        (True, 2, 2),  # the last of 4 chunks does not exist
        (True, 1, 1),
        (True, 4, 3),
    ],
)
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_except_last_counts_existing_microbatches_unless_strict(
    switch, is_strict, num_rows, expected, dispatch
):
    flags = []

    def note(x):
        flags.append((is_checkpointing(), is_recomputing()))
        return x * 1

    switch(is_strict)
    layers = nn.Sequential(Functional(note))
    pipe = Pipe(layers, 4, return_tensors=True, dispatch=dispatch)
    pipe(rows(num_rows)).sum().backward()
    assert flags.count((True, False)) == flags.count((False, True)) == expected
    assert len(flags) == num_rows + expected
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
@every_dispatch
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_flags_tell_the_pass_in_every_schedule(mode, dispatch, schedule):
    flags = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            flags.append(("forward", is_checkpointing(), is_recomputing()))
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            flags.append(("backward", is_checkpointing(), is_recomputing()))
            return grad

    layers = nn.Sequential(Functional(Note.apply), Functional(Note.apply))
    takes_loss = schedule != "gpipe"
    loss = (lambda y, t: (y * t).mean()) if takes_loss else None
    pipe = make_pipe(
        layers, 2, 3, mode, dispatch=dispatch, schedule=schedule, loss=loss
    )
    x = rows(3)
    out = pipe(x, targets=torch.ones(3, 1)) if takes_loss else pipe(x)
    out.sum().backward()
    pipe.close()
    again = 2 * {"never": 0, "except_last": 2, "always": 3}[mode]
    assert flags.count(("forward", True, False)) == again
    assert flags.count(("forward", False, True)) == again
    assert flags.count(("forward", False, False)) == 6 - again
    assert flags.count(("backward", False, False)) == 6
    assert len(flags) == 12 + again
    assert (is_checkpointing(), is_recomputing()) == (False, False)


@every_dispatch
@pytest.mark.parametrize("num_stages", [1, 2])
def test_recomputation_comes_right_before_its_backward(dispatch, num_stages):
    logs = [[] for _ in range(num_stages)]
    layers = nn.Sequential(*[logged(log, j) for j, log in enumerate(logs)])
    pipe = make_pipe(layers, num_stages, 2, "always", dispatch=dispatch)
    pipe(rows(2)).sum().backward()
    pipe.close()
    for stage, log in enumerate(logs):
        assert log == [
            ("forward", 0, stage),
            ("forward", 1, stage),
            ("recompute", 1, stage),
            ("backward", 1, stage),
            ("recompute", 0, stage),
            ("backward", 0, stage),
        ]


def test_recomputation_does_not_wait_for_the_gradient_of_the_next_stage():
    # The next stage's backward ends only when the recomputation has begun.
    recomputing = threading.Event()

    def first(x):
        if is_recomputing():
            recomputing.set()
        return x * 2

    class WaitInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            assert recomputing.wait(DEADLINE_S), "recomputation waits for a gradient"
            return grad

    layers = nn.Sequential(Functional(first), Functional(WaitInBackward.apply))
    pipe = make_pipe(layers, 2, 1, "always", dispatch="threads")
    x = rows(1)
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 1), 2.0))
    pipe.close()


@pytest.mark.parametrize("still", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@every_dispatch
def test_stage_held_still_does_not_switch_training_off(still, schedule, dispatch):
    flags = []

    def note(x):
        flags.append((is_checkpointing(), is_recomputing()))
        return x * 1

    layers = nn.Sequential(*linears(1), nn.Sequential(Functional(note), *linears(1)))
    loss = None if schedule == "gpipe" else nn.MSELoss()
    pipe = make_pipe(
        layers, 2, 2, "always", schedule=schedule, loss=loss, dispatch=dispatch
    )
    x = torch.ones(2, 5, dtype=torch.double)

    def call():
        return pipe(x).sum() if loss is None else pipe(x, targets=x)

    pipe.partitions[still].eval()
    call().backward()
    assert sorted(flags) == [(False, True)] * 2 + [(True, False)] * 2
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    flags.clear()
    pipe.partitions[1 - still].eval()
    found = call()
    assert flags == [(False, False)] * 2 and found.requires_grad == (loss is None)
    pipe.close()


@pytest.mark.parametrize("mode", ["always", "except_last"])
@every_dispatch
def test_stage_without_gradient_is_not_run_again(mode, dispatch):
    passes = []

    def note(x):
        passes.append(is_recomputing())
        return x * 1

    frozen = linears(1)[0].requires_grad_(False)
    layers = nn.Sequential(nn.Sequential(frozen, Functional(note)), *linears(1))
    pipe = make_pipe(layers, 2, 3, mode, dispatch=dispatch)
    y = pipe(torch.ones(3, 5, dtype=torch.double))
    y.sum().backward()
    assert passes == [False] * 3 and layers[1].weight.grad is not None
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
def test_outputs_require_grad_exactly_where_the_plain_model_says(mode):
    layers = nn.Sequential(
        *linears(1), Functional(lambda x: (x.detach(), x, x.argmax(1), x.detach() + 1))
    )
    pipe = make_pipe(layers, 2, 3, mode)
    outputs = pipe(torch.ones(3, 5, dtype=torch.double))
    assert [t.requires_grad for t in outputs] == [False, True, False, False]
    layers.requires_grad_(False)
    outputs = pipe(torch.ones(3, 5, dtype=torch.double))
    assert not any(t.requires_grad for t in outputs)
    pipe.close()
