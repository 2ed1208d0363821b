"""CPU stages work at the same time, shown by meetings with a deadline."""

import threading

import pytest
import torch
from torch import nn

from pipetransformer.pipe import is_recomputing

from .models import Functional, make_pipe

DEADLINE_S = 60


class MeetInBackward(torch.autograd.Function):
    """Waits for a partner in backward."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if ctx.barrier is not None:
            ctx.barrier.wait(DEADLINE_S)
        return grad * 2, None


class Meetings:
    """Cells of one clock (of a pass) on neighbouring stages wait for each other."""

    def __init__(self, num_stages, num_microbatches, in_pass):
        self.in_pass = in_pass
        self.met = 0
        self.barriers = {
            clock: threading.Barrier(members, action=self.count)
            for clock in range(num_stages + num_microbatches - 1)
            if (members := self.members(clock, num_stages, num_microbatches)) > 1
        }

    @staticmethod
    def members(clock, num_stages, num_microbatches):
        return sum(0 <= clock - j < num_microbatches for j in range(num_stages))

    def count(self):
        self.met += 1

    def layer(self, stage, row_of):
        def fn(x):
            barrier = self.barriers.get(int(row_of(x)) + stage)
            this = "recomputation" if is_recomputing() else "forward"
            if barrier is not None and self.in_pass == this:
                barrier.wait(DEADLINE_S)
            meets = barrier if self.in_pass == "backward" else None
            return MeetInBackward.apply(x, meets)

        return Functional(fn)


def run(num_stages, num_microbatches, mode, meetings, **options):
    """Outputs and input gradient; row i holds i * 2 ** (number of stages passed)."""
    layers = nn.Sequential(
        *[
            meetings.layer(j, lambda x, j=j: x[0, 0].item() / 2**j)
            for j in range(num_stages)
        ]
    )
    pipe = make_pipe(layers, num_stages, num_microbatches, mode, **options)
    x = torch.arange(float(num_microbatches))[:, None].requires_grad_()
    y = pipe(x)
    y.sum().backward()
    pipe.close()
    return y.detach(), x.grad


@pytest.mark.parametrize("num_stages, num_microbatches", [(2, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize(
    "mode, in_pass",
    [
        ("never", "forward"),
        ("never", "backward"),
        ("always", "forward"),
        ("always", "backward"),
        ("always", "recomputation"),
        ("except_last", "forward"),
        ("except_last", "backward"),
    ],
)
def test_stages_meet_in_every_pass_with_the_numbers_of_one_dispatcher(
    num_stages, num_microbatches, mode, in_pass
):
    shape = (num_stages, num_microbatches, mode)
    nobody = Meetings(num_stages, 0, "nowhere")
    expected = run(*shape, nobody, dispatch="serial")
    meetings = Meetings(num_stages, num_microbatches, in_pass)
    actual = run(*shape, meetings, dispatch="threads")
    assert meetings.met == len(meetings.barriers) > 0
    for mine, other in zip(actual, expected, strict=True):
        assert torch.equal(mine, other)


def test_backward_of_one_stage_meets_the_forward_of_another():
    # What a schedule with the loss is for: the passes of different micro-batches
    # run at the same time. Forward of 2 on stage 0 while stage 1 is in backward of 1.
    barrier = threading.Barrier(2)
    both = []

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.here = int(x[0, 0].item()) == 1
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if ctx.here:
                both.append(barrier.wait(DEADLINE_S))
            return grad

    def first(x):
        if int(x[0, 0].item()) == 2:
            both.append(barrier.wait(DEADLINE_S))
        return x * 1

    pipe = make_pipe(
        nn.Sequential(Functional(first), Functional(Meet.apply)),
        2,
        4,
        schedule="1f1b",
        loss=lambda y, t: (y * t).mean(),
        dispatch="threads",
    )
    x = torch.arange(4.0)[:, None].requires_grad_()
    pipe(x, targets=torch.ones(4, 1)).backward()
    pipe.close()
    assert sorted(both) == [0, 1]
    assert torch.equal(x.grad, torch.full((4, 1), 0.25))
