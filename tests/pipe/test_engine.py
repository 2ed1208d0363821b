"""Order, overlap and exceptions of the executor."""

import _thread
import signal
import threading
import time

import pytest
import torch
from torch import nn

from pipetransformer.pipe import is_recomputing

from .models import Functional, linears, make_pipe

DEADLINE_S = 60


class Meet(torch.autograd.Function):
    """Waits for a partner in forward and in backward, with a deadline."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        if barrier is not None:
            barrier.wait(DEADLINE_S)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.barrier is not None:
            ctx.barrier.wait(DEADLINE_S)
        return grad * 1, None


@pytest.mark.parametrize("mode", ["never", "always"])
def test_neighbouring_stages_run_at_the_same_time(mode):
    # Micro-batch 1 on stage 0 meets micro-batch 0 on stage 1: in forward while the
    # second stage is one behind, in backward while the first one is.
    barrier = threading.Barrier(2)

    def meet_when(tag):
        def fn(x):
            here = int(x[0, 0].item()) == tag
            wanted = here and not is_recomputing()
            return Meet.apply(x, barrier if wanted else None)

        return Functional(fn)

    forward_only = nn.Sequential(meet_when(1), meet_when(0))
    pipe = make_pipe(forward_only, 2, 2, mode)
    x = torch.tensor([[0.0], [1.0]], requires_grad=True)
    y = pipe(x)
    assert torch.equal(y, x)
    if mode == "never":
        # Backward order: stage 1 runs micro-batches 1, 0; stage 0 follows, so
        # micro-batch 0 on stage 1 meets micro-batch 1 on stage 0.
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
    pipe.close()


def test_order_of_calls_keeps_one_ahead_rule():
    finished = []
    lock = threading.Lock()

    def log(stage, delay_s):
        def fn(x):
            with lock:
                started = list(finished)
            time.sleep(delay_s)
            cell = (int(x[0, 0].item()), stage)
            i, j = cell
            for needed in ((i, j - 1), (i - 1, j), (i - 2, j + 1)):
                inside = needed[0] >= 0 and 0 <= needed[1] < 4
                assert not inside or needed in started, (cell, needed)
            with lock:
                finished.append(cell)
            return x

        return Functional(fn)

    layers = nn.Sequential(*[log(j, 0.002 * (j % 3)) for j in range(4)])
    pipe = make_pipe(layers, 4, 6)
    with torch.no_grad():
        pipe(torch.arange(6.0)[:, None])
    assert len(finished) == 24
    pipe.close()


def test_slow_second_stage_gives_the_documented_order():
    returned = []

    def stage(j, delay_s):
        def fn(x):
            time.sleep(delay_s)
            returned.append((int(x[0, 0].item()), j))
            return x

        return Functional(fn)

    pipe = make_pipe(nn.Sequential(stage(0, 0.0), stage(1, 0.1)), 2, 3)
    with torch.no_grad():
        pipe(torch.arange(3.0)[:, None])
    assert returned == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    pipe.close()


@pytest.mark.parametrize(
    "error", [ValueError("a", 3), SystemExit(7), KeyboardInterrupt("stop")], ids=repr
)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("microbatch", [0, 2])
def test_exception_in_forward_reaches_the_caller(error, stage, microbatch):
    armed = [True]

    def fail(x):
        if armed[0] and int(x[0, 0].item()) == microbatch:
            raise error
        return x

    layers = [Functional(lambda x: x) for _ in range(3)]
    layers[stage] = Functional(fail)
    pipe = make_pipe(nn.Sequential(*layers), 3, 4)
    x = torch.arange(4.0)[:, None]
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            pipe(x)
        assert caught.value is error
        assert any(entry.name == "fail" for entry in caught.traceback)
    armed[0] = False
    assert torch.equal(pipe(x), x)
    pipe.close()


def test_no_cell_of_a_later_clock_starts_after_a_failure():
    failed = threading.Event()
    calls = []

    def first(x):
        if int(x[0, 0].item()) > 1:
            assert failed.wait(DEADLINE_S)
        calls.append(int(x[0, 0].item()))
        return x

    def last(x):
        failed.set()
        raise ValueError("last stage")

    pipe = make_pipe(nn.Sequential(Functional(first), Functional(last)), 2, 8)
    with pytest.raises(ValueError, match="last stage"):
        pipe(torch.arange(8.0)[:, None])
    assert calls == [0, 1]
    pipe.close()


def test_lowest_clock_failure_wins():
    both = threading.Barrier(2)

    def fail(name, microbatch):
        def fn(x):
            if int(x[0, 0].item()) == microbatch:
                both.wait(DEADLINE_S)
                raise ValueError(name)
            return x

        return Functional(fn)

    pipe = make_pipe(nn.Sequential(fail("first", 1), fail("second", 0)), 2, 4)
    for _ in range(5):
        with pytest.raises(ValueError, match="first"):
            pipe(torch.arange(4.0)[:, None])
    pipe.close()


@pytest.mark.parametrize("error", [ValueError("b"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("stage", [0, 2])
def test_exception_in_backward_reaches_the_caller(error, stage):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise error

    layers = linears(3)
    layers[stage] = nn.Sequential(layers[stage], Functional(Fail.apply))
    pipe = make_pipe(nn.Sequential(*layers), 3, 4)
    x = torch.randn(8, 5, dtype=torch.double)
    with pytest.raises(type(error)) as caught:
        pipe(x).sum().backward()
    assert caught.value is error
    with torch.no_grad():
        assert pipe(x).shape == (8, 5)
    pipe.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_exception_in_recomputation_surfaces_from_backward(stage):
    def fail(x):
        if is_recomputing():
            raise ValueError("recomputing")
        return x

    layers = linears(2)
    layers[stage] = nn.Sequential(layers[stage], Functional(fail))
    pipe = make_pipe(nn.Sequential(*layers), 2, 3, "always")
    loss = pipe(torch.randn(6, 5, dtype=torch.double)).sum()
    with pytest.raises(ValueError, match="recomputing"):
        loss.backward()
    pipe.close()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dispatch", ["serial", "threads"])
def test_signal_ends_the_call_of_a_waiting_caller(in_backward, dispatch):
    num_cells = 8
    never = threading.Event()
    started = []

    def interrupt():
        started.append(1)
        if len(started) == 1:
            _thread.interrupt_main()
        never.wait(0.3)  # longer than the caller's look-up interval

    class Interrupt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if not in_backward:
                interrupt()
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            interrupt()
            return grad

    layers = nn.Sequential(*linears(1), Functional(Interrupt.apply))
    pipe = make_pipe(layers, 2, num_cells, dispatch=dispatch)
    # Ignored in a process that a shell has put into the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pipe(torch.randn(num_cells, 5, dtype=torch.double)).sum().backward()
    finally:
        signal.signal(signal.SIGINT, before)
    assert started
    # One dispatcher may run the whole backward in one call of autograd, which ends
    # as plain autograd does: when its nodes have run.
    if dispatch == "threads" or not in_backward:
        assert len(started) < num_cells
    pipe.close()
