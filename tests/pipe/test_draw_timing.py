"""Draws do not depend on when a cell runs, nor on who runs it."""

import random
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipetransformer.pipe import is_recomputing

from .models import MODES, Functional, make_pipe

DISPATCHES = ("serial", "threads")
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_mode = pytest.mark.parametrize("mode", MODES)


def mean(output, targets):
    return (output * targets).mean()


def run(layers, mode, schedule, dispatch, x):
    takes_loss = schedule != "gpipe"
    pipe = make_pipe(
        layers,
        len(layers),
        6,
        mode,
        dispatch=dispatch,
        schedule=schedule,
        loss=mean if takes_loss else None,
    )
    target = torch.ones(len(x), 1)
    torch.manual_seed(4)
    if takes_loss:
        value = pipe(x, targets=target)
        value.backward()
    else:
        value = pipe(x)
        mean(value, target).backward()
    pipe.close()
    return value.detach(), x.grad, torch.get_rng_state()


@every_mode
@every_schedule
def test_delays_and_load_change_no_bit(mode, schedule):
    delays = random.Random(7)
    delayed = [False]

    def drop(x):
        if delayed[0]:
            time.sleep(delays.choice((0, 0, 0.002)))
        return F.dropout(x, 0.5) + torch.randn(1)

    layers = nn.Sequential(*[Functional(drop) for _ in range(3)])
    quiet = run(layers, mode, schedule, "serial", torch.ones(12, 8, requires_grad=True))
    over = threading.Event()

    def load():
        generator = torch.Generator().manual_seed(1)
        while not over.is_set():
            x = torch.rand(64, 64, generator=generator)
            x @ x
            time.sleep(0.0005)

    others = threading.Thread(target=load)
    delayed[0] = True
    for dispatch in DISPATCHES:
        x = torch.ones(12, 8, requires_grad=True)
        loaded = run(layers, mode, schedule, dispatch, x)
        for mine, other in zip(loaded[:2], quiet[:2], strict=True):
            assert torch.equal(mine, other)
        assert torch.equal(loaded[2], quiet[2])
    others.start()
    try:
        x = torch.ones(12, 8, requires_grad=True)
        loaded = run(layers, mode, schedule, "threads", x)
    finally:
        over.set()
        others.join()
    for mine, other in zip(loaded[:2], quiet[:2], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("mode", ["always", "except_last"])
@every_schedule
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_gradient_has_the_zeros_of_the_output(mode, schedule, dispatch):
    outputs = {}

    def first(x):
        y = F.dropout(x, 0.5)
        return F.dropout(F.dropout(y, 0.2), 0.1)

    def second(x):
        number = int(x[0, 0].item())
        y = torch.cat([x[:, :1], F.dropout(F.dropout(x[:, 1:], 0.3), 0.1)], 1)
        if not is_recomputing():
            outputs[number] = y.detach()[:, 1:]
        return y

    def keep_number(fn):
        return lambda x: torch.cat([x[:, :1], fn(x[:, 1:])], 1)

    layers = nn.Sequential(Functional(keep_number(first)), Functional(second))
    x = torch.ones(12, 41)
    x[:, 0] = torch.arange(12) // 2
    x.requires_grad_()
    run(layers, mode, schedule, dispatch, x)
    output = torch.cat([outputs[number] for number in range(6)])
    assert torch.equal(output == 0, x.grad[:, 1:] == 0)
    assert 0.2 < (output == 0).double().mean() < 0.9
