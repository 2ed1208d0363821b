"""Threads and lifetime: what keeps a pipe, its threads and its graphs alive."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, Workers

from .models import MODES, Functional, dense, grads, linears, make_pipe

DEADLINE_S = 60


def num_threads():
    return len(os.listdir("/proc/self/task"))


def wait_for_threads(expected):
    # A joined thread leaves /proc a moment later.
    deadline = time.monotonic() + DEADLINE_S
    while num_threads() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return num_threads()


def settled_threads():
    """Return their number once those of tests before have ended."""
    deadline, same, last = time.monotonic() + DEADLINE_S, 0, num_threads()
    while same < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
        same, last = (same + 1 if num_threads() == last else 0), num_threads()
    return last


def test_threads_end_with_close_and_with_deletion():
    pipe = make_pipe(dense(), 4, 2)
    before = settled_threads()
    pipe(torch.randn(4, 5, dtype=torch.double)).sum().backward()
    assert num_threads() == before + 4
    pipe.close()
    pipe.close()
    assert wait_for_threads(before) == before
    pipe(torch.randn(4, 5, dtype=torch.double)).sum().backward()
    assert num_threads() == before + 4
    del pipe
    assert wait_for_threads(before) == before


@pytest.mark.parametrize("mode", MODES)
def test_hook_that_refers_to_the_pipe_does_not_keep_it(mode):
    gc.collect()
    before = settled_threads()
    pipe = make_pipe(nn.Sequential(*linears(2)), 2, 2, mode)
    pipe.partitions[0].register_forward_hook(lambda *_, pipe=pipe: None)
    pipe(torch.randn(4, 5, dtype=torch.double)).sum().backward()
    assert num_threads() == before + 2
    alive = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert alive() is None
    assert wait_for_threads(before) == before


def test_refused_backward_leaves_the_hooks_of_parameters():
    layers = nn.Sequential(*linears(2))
    calls = []
    layers[0].weight.register_hook(lambda grad: calls.append(1))
    x = torch.randn(4, 5, dtype=torch.double)
    with Workers(2) as closed:
        refused = make_pipe(layers, 2, 2, workers=closed)(x).sum()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected open workers, got closed"):
            refused.backward()
    pipe = make_pipe(layers, 2, 2)
    for _ in range(2):  # with the refused graph alive, then without
        calls.clear()
        pipe(x).sum().backward()
        assert calls == [1]
        refused = None
    pipe.close()


def test_backward_works_after_the_pipe_is_gone():
    layers = dense()
    pipe = make_pipe(layers, 4, 2)
    loss = pipe(torch.randn(4, 5, dtype=torch.double)).sum()
    del pipe
    loss.backward()
    assert all(g is not None for g in grads(layers))


def test_two_pipes_in_turn_share_workers():
    models, x = [dense() for _ in range(2)], torch.randn(6, 5, dtype=torch.double)
    ran_on = [set(), set()]
    for model, idents in zip(models, ran_on, strict=True):
        for layer in model:
            layer.register_forward_hook(
                lambda *_, idents=idents: idents.add(threading.get_ident())
            )
    expected = [
        torch.autograd.grad(3 * model(x).sum(), list(model.parameters()))
        for model in models
    ]
    for idents in ran_on:
        idents.clear()
    before = settled_threads()
    with Workers(2) as workers:
        pipes = [
            make_pipe(model, 2, 3, workers=workers, dispatch="threads")
            for model in models
        ]
        own = set(workers.map(lambda _: threading.get_ident(), range(2)))
        for _ in range(3):
            losses = [pipe(x).sum() for pipe in pipes]
            for loss in losses:
                loss.backward()
        assert num_threads() == before + 2
    assert len(own) == 2 and ran_on == [own, own]
    for model, values in zip(models, expected, strict=True):
        torch.testing.assert_close(grads(model), list(values))


@pytest.mark.parametrize("dispatch", ["serial", "threads"])
def test_two_pipes_with_threads_of_their_own_work_in_turn(dispatch):
    models = [dense() for _ in range(2)]
    pipes = [make_pipe(m, 4, 3, "always", dispatch=dispatch) for m in models]
    x = torch.randn(6, 5, dtype=torch.double)
    before = settled_threads()
    for _ in range(3):
        first, second = [pipe(x).sum() for pipe in pipes]
        (first * second).backward()  # one backward goes through both
    for model, other in (models, models[::-1]):
        scale = 3 * other(x).sum().detach()
        expected = torch.autograd.grad(scale * model(x).sum(), list(model.parameters()))
        torch.testing.assert_close(grads(model), list(expected))
    del pipes, first, second
    assert wait_for_threads(before) == before


@pytest.mark.parametrize("mode", MODES)
def test_dropping_the_result_frees_activations(mode):
    seen = []

    def remember(x):
        y = x * 2
        seen.append(weakref.ref(y))
        return y.sin()

    layers = nn.Sequential(
        nn.Sequential(linears(1)[0], Functional(remember)),
        nn.Sequential(linears(1)[0], Functional(remember)),
    )
    pipe = make_pipe(layers, 2, 3, mode)
    y = pipe(torch.randn(6, 5, dtype=torch.double))
    out = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert out() is None
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()
    pipe.close()


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "del pipe",
        "keep = [pending]; keep.append(keep); gc.disable(); del pipe, pending, keep",
    ],
    ids=["pipe alive", "graph alive", "graph in a garbage cycle"],
)
def test_interpreter_exits_with_threads_alive(ending):
    code = f"""
import gc
import torch
from torch import nn
from pipetransformer.pipe import Pipe
layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
pipe = Pipe(layers, chunks=2, return_tensors=True)
loss = pipe(torch.randn(4, 4)).sum()
loss.backward()
pending = pipe(torch.randn(4, 4)).sum()
{ending}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_neither_joins_nor_breaks_the_parent():
    pipe = make_pipe(dense(), 2, 2)
    x = torch.randn(4, 5, dtype=torch.double)
    pipe(x)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pipe.close()
            del pipe
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + DEADLINE_S
    done, status = os.waitpid(pid, os.WNOHANG)
    while done == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(pid, os.WNOHANG)
    assert done == pid and status == 0
    pipe(x).sum().backward()
    pipe.close()


def test_closed_workers_are_refused():
    workers = Workers(2)
    pipe = Pipe.from_plan(dense(), cuts=[0, 2, 4], num_microbatches=2, workers=workers)
    workers.close()
    with pytest.raises(RuntimeError, match="expected open workers, got closed ones"):
        pipe(torch.randn(4, 5, dtype=torch.double))


@pytest.mark.parametrize("place", ["layer", "hook"])
def test_close_by_a_layer_or_hook_is_refused_and_the_process_ends_well(place):
    # Of a process of its own: a half-closed pool would abort it at exit.
    code = f"""
import torch
from torch import nn
from pipetransformer.pipe import Pipe
class Closing(nn.Module):
    def forward(self, x):
        if {place == "layer"} and wanted:
            pipe.close()
        elif x.requires_grad and wanted:
            x.register_hook(lambda grad: pipe.close())
        return x * 1
layers = nn.Sequential(nn.Linear(4, 4), Closing(), nn.Linear(4, 4))
pipe = Pipe(layers, chunks=2, dispatch="threads", return_tensors=True)
for wanted in (True, False):
    try:
        pipe(torch.randn(4, 4)).sum().backward()
        assert not wanted
    except RuntimeError as error:
        assert wanted and "expected a call from outside" in str(error)
pipe.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


@pytest.mark.parametrize("runs", ["forward", "backward"])
def test_interpreter_exits_before_the_end_of_a_daemon_threads_call(runs):
    code = f"""
import atexit
num_calls = 0
atexit.register(lambda: print(num_calls))  # before the pipe's: runs after it
import sys, threading, time
import torch
from torch import nn
from pipetransformer.pipe import Pipe
begun = threading.Event()
def wait():
    global num_calls
    num_calls += 1
    begun.set()
    time.sleep(0.1)
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if {runs == "forward"}:
            wait()
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        if {runs == "backward"}:
            wait()
        return grad
class Layer(nn.Module):
    def forward(self, x):
        return Slow.apply(x)
layers = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 4))
pipe = Pipe(layers, 100, "always", dispatch="threads", return_tensors=True)
def train():
    pipe(torch.randn(100, 4)).sum().backward()
threading.Thread(target=train, daemon=True).start()
begun.wait()
sys.exit(5)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 5, done.stderr
    assert 1 <= int(done.stdout) < 20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_of(repeat, warm_up, count):
    """Resident bytes that `count` repetitions add, after `warm_up` of them."""
    for _ in range(warm_up):
        repeat()
    gc.collect()
    before = resident_bytes()
    for _ in range(count):
        repeat()
    gc.collect()
    return resident_bytes() - before


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["threads", "serial"])
def test_a_hundred_pipes_leave_no_thread_and_no_memory(dispatch):
    width = 256
    x = torch.randn(4, width)
    threads = num_threads()

    def build_train_drop():
        layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        pipe = make_pipe(layers, 4, 2, "except_last", dispatch=dispatch)
        pipe(x).sum().backward()

    grown = growth_of(build_train_drop, 20, 100)
    # The layers of one pipe and their gradients take 2 MiB: 200 MiB if they stayed.
    assert grown < 40 * 2**20
    assert wait_for_threads(threads) <= threads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "dispatch", "mode", "schedule"),
    [
        (10_000, "serial", "except_last", "gpipe"),
        (4_000, "threads", "always", "gpipe"),
        (4_000, "serial", "never", "zb-h1"),
    ],
)
def test_thousands_of_steps_keep_memory_flat(count, dispatch, mode, schedule):
    width = 256
    layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    loss = None if schedule == "gpipe" else nn.functional.mse_loss
    pipe = make_pipe(
        layers, 2, 2, mode, dispatch=dispatch, schedule=schedule, loss=loss
    )
    x = torch.randn(8, width)

    def step():
        if loss is None:
            pipe(x).sum().backward()
        else:
            pipe(x, targets=x).backward()

    grown = growth_of(step, 500, count)
    pipe.close()
    # If each step kept the smallest tensor, that of a micro-batch at the border, it
    # would be 4 KiB a step. What allocators keep settles within the warm-up.
    assert grown < count * 2**10, grown
