"""Stages work at the same time, shown by barriers: neighbours have to meet."""

import threading

import pytest
import torch
from torch import nn

from pipetransformer.pipe import is_recomputing

from .models import MODES, Functional, even_cuts, grads, make_pipe

DEADLINE_S = 60
STAGES, MICROBATCHES = 3, 4


class Watch(torch.autograd.Function):
    """Passes a tensor through; calls a function in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Meeting:
    """Cell (i, j) meets the cells of its own wave: (i + 1, j - 1) and (i - 1, j + 1).

    The waves of the backward pass join the same cells, in reverse order.
    """

    def __init__(self, deadline_s):
        self.deadline_s = deadline_s
        self.barriers = {
            (i, j): threading.Barrier(2)  # of (i, j) and (i - 1, j + 1)
            for i in range(1, MICROBATCHES)
            for j in range(STAGES - 1)
        }

    def arrive(self, i, j):
        for met in ((i + 1, j - 1), (i, j)):
            if met in self.barriers:
                self.barriers[met].wait(self.deadline_s)


def run(dispatch, mode, deadline_s=None):
    """Outputs and gradients; with a deadline, cells of a wave have to meet."""
    torch.manual_seed(0)
    forward = backward = None
    if deadline_s is not None:
        forward, backward = Meeting(deadline_s), Meeting(deadline_s)
    num_forward, num_backward = [0] * STAGES, [0] * STAGES

    def meet_in_backward(j):
        i = MICROBATCHES - 1 - num_backward[j]
        num_backward[j] += 1
        if backward is not None:
            backward.arrive(i, j)

    def layer(j):
        def call(x):
            if not is_recomputing():
                i = num_forward[j]
                num_forward[j] += 1
                if forward is not None:
                    forward.arrive(i, j)
            return Watch.apply(x, lambda: meet_in_backward(j))

        return nn.Sequential(nn.Linear(5, 5).double(), Functional(call), nn.Tanh())

    layers = nn.Sequential(*(layer(j) for j in range(STAGES)))
    assert even_cuts(len(layers), STAGES) == list(range(STAGES + 1))
    pipe = make_pipe(layers, STAGES, MICROBATCHES, mode, dispatch=dispatch)
    x = torch.randn(8, 5, dtype=torch.double, requires_grad=True)
    try:
        y = pipe(x)
        y.sum().backward()
    finally:
        pipe.close()
    assert num_forward == num_backward == [MICROBATCHES] * STAGES
    return [y.detach(), x.grad, *grads(layers)]


@pytest.mark.parametrize("mode", MODES)
def test_neighbouring_stages_overlap_in_both_passes(mode):
    met = run("threads", mode, DEADLINE_S)
    for mine, serial in zip(met, run("serial", mode), strict=True):
        assert torch.equal(mine, serial)


def test_one_dispatcher_lets_no_stages_meet():
    # What the barriers show would not be shown by anything that runs in turns.
    with pytest.raises(threading.BrokenBarrierError):
        run("serial", "never", deadline_s=0.1)
