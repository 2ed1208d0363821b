"""Workers.map: order, context, failures, threads."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Workers

from .models import Functional, make_pipe

DEADLINE_S = 60


def test_map_keeps_order_and_spreads_over_workers():
    with Workers(3) as workers:
        idents = workers.map(lambda k: (k, threading.get_ident()), range(9))
        assert [k for k, _ in idents] == list(range(9))
        for k in range(9):
            assert idents[k][1] == idents[k % 3][1]
        assert len({ident for _, ident in idents}) == 3
        assert workers.map(str, []) == []


def test_map_calls_run_at_the_same_time():
    barrier = threading.Barrier(2)
    with Workers(2) as workers:
        workers.map(lambda _: barrier.wait(DEADLINE_S), range(2))


def test_map_with_one_worker_runs_in_the_caller():
    with Workers(1) as workers:
        assert workers.map(lambda _: threading.get_ident(), [0]) == [
            threading.get_ident()
        ]


def test_map_carries_the_callers_context():
    def state(_):
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )

    with Workers(2) as workers:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert workers.map(state, [0, 1]) == [state(0)] * 2
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert workers.map(state, [0, 1]) == [state(0)] * 2


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
def test_map_raises_the_failure_with_the_lowest_index(error):
    meet = threading.Barrier(2)

    def fail(k):
        if k in (2, 3):
            meet.wait(DEADLINE_S)
            raise error if k == 2 else OSError("later")
        return k

    with Workers(2) as workers:
        for _ in range(5):
            with pytest.raises(type(error)) as caught:
                workers.map(fail, range(8))
            assert caught.value is error
            assert any(entry.name == "fail" for entry in caught.traceback)
        assert workers.map(abs, [-1, -2]) == [1, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_workers_compute_with_their_own_number_of_threads(threads):
    before = torch.get_num_threads()
    with Workers(2, intra_op_threads=threads) as workers:
        assert workers.map(lambda _: torch.get_num_threads(), [0, 1]) == [threads] * 2
    assert torch.get_num_threads() == before


def test_python_thread_data_survives_between_calls():
    local = threading.local()

    def count(_):
        local.value = getattr(local, "value", 0) + 1
        return local.value

    with Workers(2) as workers:
        assert workers.map(count, range(4)) == [1, 1, 2, 2]
        assert workers.map(count, range(2)) == [3, 3]


@pytest.mark.parametrize("keep", ["local.kept = kept", "variable.set(kept)"])
def test_tensors_in_thread_data_end_with_their_thread(keep):
    # A graph that dies with its thread takes the GIL by counting the uses of the
    # thread's state: the state was counted as unused, and deleted twice.
    code = f"""
import contextvars, threading
import torch
from pipetransformer.pipe import Workers
local, variable = threading.local(), contextvars.ContextVar("variable")
def call(k):
    weight = torch.ones(3, 3, requires_grad=True)
    kept = torch.addmm(weight, weight.clone(), weight).tanh()
    {keep}
for _ in range(20):
    with Workers(2) as workers:
        workers.map(call, range(4))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


def test_drain_waits_for_cells_that_a_failed_backward_left_behind():
    num_cells = 4
    released = threading.Event()
    ended = []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if len(ended) == num_cells - 1:
                assert released.wait(DEADLINE_S)
            ended.append(1)
            return grad

    def fail(grad):
        raise ValueError("hook")

    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers[0] = nn.Sequential(layers[0], Functional(Slow.apply))
    layers[1].weight.register_hook(fail)
    with Workers(2) as workers:
        loss = make_pipe(layers, 2, num_cells, workers=workers)(torch.randn(8, 3)).sum()
        with pytest.raises(ValueError, match="hook"):
            loss.backward()
        with pytest.raises(TimeoutError, match="workers: expected to be done within"):
            workers.drain(timeout_s=0.01)
        assert len(ended) < num_cells
        released.set()
        workers.drain(timeout_s=DEADLINE_S)
        assert len(ended) == num_cells


def test_drain_waits_for_the_calls_of_a_single_worker():
    started, released = threading.Event(), threading.Event()
    ended = []

    def hold(x):
        started.set()
        assert released.wait(DEADLINE_S)
        ended.append(1)
        return x

    with Workers(1) as workers:
        pipe = make_pipe(nn.Sequential(Functional(hold)), 1, 2, workers=workers)
        caller = threading.Thread(target=pipe, args=(torch.zeros(2, 1),))
        caller.start()
        assert started.wait(DEADLINE_S)
        with pytest.raises(TimeoutError, match="calls still running"):
            workers.drain(timeout_s=0.01)
        released.set()
        workers.drain(timeout_s=DEADLINE_S)
        assert len(ended) == 2
        caller.join(DEADLINE_S)


def test_drain_needs_no_wait_when_nothing_runs():
    workers = Workers(2)
    workers.drain(timeout_s=DEADLINE_S)
    assert workers.map(abs, [-1, 2]) == [1, 2]
    workers.drain(timeout_s=DEADLINE_S)
    assert workers.map(abs, [-3, 4]) == [3, 4], "drained workers go on"
    workers.close()
    workers.drain(timeout_s=DEADLINE_S)
    with pytest.raises(RuntimeError, match="closed"):
        workers.map(abs, [1, 2])


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_drain_needs_a_positive_time(timeout_s):
    with (
        Workers(1) as workers,
        pytest.raises(ValueError, match="timeout_s: expected a positive time, got"),
    ):
        workers.drain(timeout_s=timeout_s)


def test_drain_on_a_worker_is_refused():
    with (
        Workers(2) as workers,
        pytest.raises(RuntimeError, match="expected a call from outside"),
    ):
        workers.map(lambda _: workers.drain(), [0, 1])


def test_call_on_a_worker_is_refused():
    with (
        Workers(2) as workers,
        pytest.raises(RuntimeError, match="expected a call from outside"),
    ):
        workers.map(lambda _: workers.map(abs, [1, 2]), [0, 1])


def test_close_on_a_worker_is_refused_and_changes_nothing():
    with Workers(2) as workers:
        with pytest.raises(RuntimeError, match="expected a call from outside"):
            workers.map(lambda _: workers.close(), [0, 1])
        assert workers.map(abs, [-1, -2]) == [1, 2]


def test_closed_workers_are_refused():
    workers = Workers(2)
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="expected open workers, got closed ones"):
        workers.map(abs, [1, 2])


@pytest.mark.parametrize("count", [0, -1])
def test_number_of_workers_must_be_positive(count):
    with pytest.raises(ValueError, match="num_workers: expected at least 1, got"):
        Workers(count)


def test_number_of_threads_must_be_positive():
    with pytest.raises(ValueError, match="intra_op_threads: expected at least 1"):
        Workers(1, intra_op_threads=0)


def test_processor_time_counts_work_and_not_waiting():
    def burn(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    with Workers(2) as workers:
        before = workers.cpu_seconds()
        workers.map(lambda work: burn(0.2) if work else time.sleep(0.2), [True, False])
        used = [b - a for a, b in zip(before, workers.cpu_seconds(), strict=True)]
        assert used[0] >= 0.2 and used[1] < 0.1
    assert workers.cpu_seconds() == []


def test_processor_time_is_refused_on_a_worker():
    with Workers(2) as workers:
        for item in range(2):
            with pytest.raises(RuntimeError, match="expected a call from outside"):
                workers.map(lambda _: workers.cpu_seconds(), [item, item])


def test_spare_parts_run_until_all_are_over():
    def part(item):
        item.append(threading.get_ident())
        return len(item) < 5

    items = [[] for _ in range(7)]
    with Workers(3) as workers:
        workers.spare(part, items).wait()
        assert [len(item) for item in items] == [5] * 7
        assert threading.get_ident() not in {k for item in items for k in item}
        handle = workers.spare(part, [])
        handle.wait()
        handle.wait()
        handle.cancel()


def test_spare_parts_keep_the_callers_context():
    def state():
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    def part(item):
        item.append(state())
        return len(item) < 3

    with Workers(2) as workers:
        for grad in (True, False):
            items = [[], []]
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
                expected = state()
                handle = workers.spare(part, items)
            handle.wait()
            assert items == [[expected] * 3] * 2
        assert workers.map(lambda _: state(), [0, 1]) == [state()] * 2


def test_what_waits_for_a_worker_comes_before_spare_parts():
    over = threading.Event()

    def part(_):
        return not over.is_set()

    with Workers(2) as workers:
        handle = workers.spare(part, range(4))  # for ever
        assert workers.map(abs, [-1, -2, -3, -4]) == [1, 2, 3, 4]
        workers.drain(timeout_s=DEADLINE_S)
        over.set()
        handle.wait()


def test_a_stage_that_waits_for_another_runs_spare_parts():
    begun, over = threading.Event(), threading.Event()
    in_gap = []

    def part(_):
        if begun.is_set() and not over.is_set():
            in_gap.append(threading.get_ident())
        return not over.is_set()

    def first_stage(x):
        begun.set()
        limit = time.monotonic() + DEADLINE_S
        while len(in_gap) < 3:  # the other worker has nothing else to do
            assert time.monotonic() < limit, "spare parts have not run"
            time.sleep(0.001)
        over.set()
        return x

    layers = nn.Sequential(Functional(first_stage), nn.Linear(3, 3))
    with Workers(2) as workers:
        pipe = make_pipe(layers, 2, 1, workers=workers)
        handle = workers.spare(part, [0])
        pipe(torch.randn(2, 3))
        handle.wait()
    assert len(set(in_gap)) == 1


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
def test_a_failed_spare_part_ends_later_items(error):
    meet = threading.Barrier(2)

    def part(k):
        if k < 2:
            meet.wait(DEADLINE_S)
            raise error if k == 0 else OSError("later")
        return True  # for ever, unless it is stopped

    with Workers(2) as workers:
        handle = workers.spare(part, range(5))
        with pytest.raises(type(error)) as caught:
            handle.wait()
        assert caught.value is error
        handle.wait()
        assert workers.map(abs, [-1, -2]) == [1, 2]


def test_cancelled_spare_parts_are_over():
    running = []

    def part(k):
        running.append(k)
        time.sleep(0.001)
        running.remove(k)
        return True

    with Workers(2) as workers:
        handle = workers.spare(part, range(3))
        handle.cancel()
        assert not running
        handle.wait()
        handle.cancel()


def test_workers_that_close_run_spare_parts_to_their_end():
    items = [[], []]

    def part(item):
        item.append(0)
        return len(item) < 50

    workers = Workers(2)
    handle = workers.spare(part, items)
    workers.close()
    handle.wait()
    assert [len(item) for item in items] == [50, 50]
    with pytest.raises(RuntimeError, match="expected open workers, got closed ones"):
        workers.spare(part, items)


def test_spare_parts_that_nobody_waits_for_let_the_process_end():
    code = """
import time
import torch
from pipetransformer.pipe import Workers
def part(item):
    item.append(torch.ones(3))
    time.sleep(0.01)
    return len(item) < 20
handle = Workers(2).spare(part, [[], [], []])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
