"""One dispatcher or a thread per stage: the same bits, and a pure choice."""

import copy
import threading
import time

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, is_recomputing
from tests.support.pipe_order import DispatchChoice

from .models import MODES, Functional, even_cuts, grads, linears, make_pipe

DISPATCHES = ("serial", "threads")
every_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)
SHORT_NS, BETWEEN_NS, LONG_NS = 99_999, 120_000, 150_001


def noisy(num_layers=4, width=7):
    """Float32: sums in another order would show."""
    return nn.Sequential(
        *[
            nn.Sequential(
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Dropout(0.3),
                Functional(lambda x: nn.functional.dropout(x, 0.1)),
            )
            for _ in range(num_layers)
        ]
    )


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def train(layers, dispatch, mode, num_stages, num_microbatches, schedule):
    """Outputs or losses, input gradients and gradients of two steps."""
    takes_loss = schedule != "gpipe"
    pipe = Pipe.from_plan(
        layers,
        cuts=even_cuts(len(layers), num_stages),
        num_microbatches=num_microbatches,
        checkpoint=mode,
        schedule=schedule,
        loss=mean_square if takes_loss else None,
        dispatch=dispatch,
    )
    assert pipe.current_dispatch() == dispatch
    torch.manual_seed(5)
    seen = []
    for _ in range(2):
        x = torch.randn(13, 7, requires_grad=True)
        target = torch.randn(13, 7)
        output = pipe(x, targets=target) if takes_loss else pipe(x)
        seen.append(output.detach())
        (output if takes_loss else mean_square(output, target)).backward()
        seen.append(x.grad)
        seen.extend(grads(layers))
    pipe.close()
    return seen, torch.get_rng_state()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("num_stages, num_microbatches", [(1, 3), (2, 5), (4, 6)])
def test_dispatch_changes_no_bit(mode, schedule, num_stages, num_microbatches):
    layers = noisy()
    (serial, serial_state), (threads, threads_state) = [
        train(copy.deepcopy(layers), way, mode, num_stages, num_microbatches, schedule)
        for way in DISPATCHES
    ]
    assert torch.equal(serial_state, threads_state)
    for mine, other in zip(serial, threads, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_dispatch_changes_rounding_only_where_a_parameter_is_shared(mode, schedule):
    # Its gradient is a sum over cells of two stages, taken in one order or another.
    layers = noisy()
    layers[3][0].weight = layers[0][0].weight
    serial, threads = [
        train(copy.deepcopy(layers), way, mode, 4, 6, schedule)[0] for way in DISPATCHES
    ]
    for mine, other in zip(serial, threads, strict=True):
        torch.testing.assert_close(mine, other)


@every_dispatch
def test_number_of_threads_is_that_of_the_dispatch(dispatch):
    idents = set()

    def note(x):
        idents.add(threading.get_ident())
        return x * 1

    layers = nn.Sequential(*[Functional(note) for _ in range(3)])
    x = torch.ones(4, 2, requires_grad=True)
    pipe = make_pipe(layers, 3, 4, "always", dispatch=dispatch)
    pipe(x).sum().backward()
    pipe.close()
    assert len(idents) == (1 if dispatch == "serial" else 3)
    # On the CPU one dispatcher needs no other thread than the caller's.
    assert (threading.get_ident() in idents) == (dispatch == "serial")


@pytest.mark.parametrize("mode", MODES)
def test_serial_runs_forward_in_clock_order_and_backward_in_one_order(mode):
    forward, backward = [], []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cell):
            ctx.cell = cell
            if not is_recomputing():
                forward.append(cell)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            backward.append(ctx.cell)
            return grad, None

    def stage(j):
        return Functional(lambda x: Note.apply(x, (int(x[0, 0].item()), j)))

    n, m = 3, 4
    layers = nn.Sequential(*[stage(j) for j in range(n)])
    pipe = make_pipe(layers, n, m, mode, dispatch="serial")
    orders = []
    for _ in range(3):
        forward.clear()
        backward.clear()
        pipe(torch.arange(4.0)[:, None].requires_grad_()).sum().backward()
        orders.append(tuple(backward))
    pipe.close()
    cells = [(i, j) for i in range(m) for j in range(n)]
    assert forward == sorted(cells, key=lambda cell: (sum(cell), cell[1]))
    assert len(set(orders)) == 1 and sorted(backward) == cells
    for i, j in cells:
        if j + 1 < n:
            assert backward.index((i, j + 1)) < backward.index((i, j))
        if i + 1 < m:
            assert backward.index((i + 1, j)) < backward.index((i, j))


def test_auto_starts_with_threads_where_calls_block():
    assert DispatchChoice(blocking=True).current() == "threads"
    assert DispatchChoice(blocking=False).current() == "serial"


def test_auto_leaves_out_the_first_pass_and_incomplete_ones():
    choice = DispatchChoice(blocking=True)
    choice.observe([])
    choice.observe([SHORT_NS, 0])
    choice.observe([1, 1])  # warms up
    assert choice.current() == "threads"
    choice.observe([SHORT_NS, 0])
    choice.observe([])
    assert choice.current() == "threads"
    choice.observe([SHORT_NS, SHORT_NS])
    assert choice.current() == "serial"


def test_auto_decides_by_the_mean_over_stages():
    choice = DispatchChoice(blocking=True)
    choice.observe([1, 1])
    choice.observe([1, 2 * LONG_NS])
    assert choice.current() == "threads"
    choice.observe([1, 2 * SHORT_NS - 3])
    assert choice.current() == "serial"


def test_auto_keeps_its_choice_between_the_two_limits():
    choice = DispatchChoice(blocking=True)
    for times_ns, expected in [
        (BETWEEN_NS, "threads"),  # warms up
        (BETWEEN_NS, "threads"),
        (SHORT_NS, "serial"),
        (BETWEEN_NS, "serial"),
        (LONG_NS - 1, "serial"),
        (LONG_NS, "threads"),
        (BETWEEN_NS, "threads"),
        (SHORT_NS + 1, "threads"),
        (SHORT_NS, "serial"),
    ]:
        choice.observe([times_ns])
        assert choice.current() == expected


def test_auto_never_leaves_one_dispatcher_on_accelerators():
    choice = DispatchChoice(blocking=False)
    for _ in range(3):
        choice.observe([100 * LONG_NS])
    assert choice.current() == "serial"


def test_current_dispatch_tells_what_was_asked_for():
    layers = nn.Sequential(*linears(2))
    for dispatch, expected in [
        ("serial", "serial"),
        ("threads", "threads"),
        ("auto", "threads"),
    ]:
        assert Pipe(layers, 2, dispatch=dispatch).current_dispatch() == expected


def test_auto_keeps_threads_for_cells_that_block():
    def wait(x):
        time.sleep(0.001)  # never shorter, so longer than the upper limit
        return x * 1

    pipe = make_pipe(nn.Sequential(*[Functional(wait) for _ in range(2)]), 2, 2)
    for _ in range(4):
        with torch.no_grad():
            pipe(torch.ones(2, 2))
        assert pipe.current_dispatch() == "threads"
    pipe.close()
