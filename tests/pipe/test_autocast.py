"""Training under autocast: the same bits whatever the timing, and whose they are."""

import copy
import threading
import time

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Workers

from .models import MODES, Functional, grads, make_pipe

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
DISPATCHES = ("serial", "threads")
DEADLINE_S = 60.0

every_mode = pytest.mark.parametrize("mode", MODES)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)


def casting(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


class Twice(nn.Module):
    """Uses a weight twice; `between` is called in the middle."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.between = lambda: None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.between()
        return torch.tanh(self.linear(y))


class Island(nn.Module):
    """A layer with a region of its own without autocast, as rotary embeddings have."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return torch.sin(self.linear(x.float()))


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), Twice(), Island(), nn.LayerNorm(8), Twice(), nn.Linear(8, 8)
    )


def batch(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, rows, 8, generator=generator)


def loss_of(y, targets):
    return nn.functional.mse_loss(y.float(), targets)


def train(layers, microbatches=4, stages=2, **options):
    """Return the loss and the gradients of one batch in one autocast region."""
    schedule = options.pop("schedule", "gpipe")
    x, targets = batch()
    loss = None if schedule == "gpipe" else loss_of
    pipe = make_pipe(
        layers,
        stages,
        microbatches,
        options.pop("mode", "never"),
        schedule=schedule,
        loss=loss,
        **options,
    )
    with casting():
        value = pipe(x, targets=targets) if loss else loss_of(pipe(x), targets)
    value.backward()
    pipe.close()
    return value.detach(), grads(layers)


def assert_same_bits(left, right):
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@every_mode
@every_dispatch
@every_schedule
def test_sums_of_two_microbatches_are_exactly_those_of_uncached_autocast(
    schedule, dispatch, mode
):
    # Two: a sum of two has one value in any order.
    plain = model()
    x, targets = batch()
    for rows, wanted in zip(x.chunk(2), targets.chunk(2), strict=True):
        with casting(cache_enabled=False):
            loss = loss_of(plain(rows), wanted) / 2
        loss.backward()
    layers = model()
    train(layers, 2, schedule=schedule, dispatch=dispatch, mode=mode)
    assert_same_bits(grads(layers), grads(plain))


@pytest.mark.parametrize("stages", [1, 2, 3])
@every_schedule
def test_dispatch_and_checkpointing_leave_the_bits_as_they_are(schedule, stages):
    expected = train(model(), stages=stages, schedule=schedule, dispatch="serial")
    for dispatch in DISPATCHES:
        for mode in MODES:
            options = {"schedule": schedule, "dispatch": dispatch, "mode": mode}
            loss, found = train(model(), stages=stages, **options)
            assert torch.equal(loss, expected[0])
            assert_same_bits(found, expected[1])


def leave_a_region():
    """Let a thread of its own leave its outermost autocast region."""

    def enter_and_leave():
        with casting():
            pass

    other = threading.Thread(target=enter_and_leave)
    other.start()
    other.join(DEADLINE_S)
    assert not other.is_alive()


@every_mode
@every_dispatch
@every_schedule
def test_what_other_threads_leave_between_two_uses_of_a_weight_changes_nothing(
    schedule, dispatch, mode
):
    options = {"schedule": schedule, "dispatch": dispatch, "mode": mode}
    expected = train(model(), **options)
    layers = model()
    layers[1].between = leave_a_region  # casts of the process are dropped here
    loss, found = train(layers, **options)
    assert torch.equal(loss, expected[0])
    assert_same_bits(found, expected[1])


@every_mode
@every_schedule
def test_a_region_left_on_the_next_stages_worker_changes_nothing(schedule, mode):
    options = {"schedule": schedule, "dispatch": "threads", "mode": mode}
    quiet = nn.Sequential(Twice(), nn.Sequential(Island(), Twice()))
    layers = copy.deepcopy(quiet)
    expected = train(quiet, **options)
    # The first stage waits in the middle of a micro-batch for a region to be left by
    # the second, which works on the one before; the first one has nobody to wait for.
    left = threading.Semaphore(1)

    def wait():
        assert left.acquire(timeout=DEADLINE_S)

    layers[0].between = wait
    layers[1][0].register_forward_hook(lambda *_: left.release())
    loss, found = train(layers, **options)
    assert torch.equal(loss, expected[0])
    assert_same_bits(found, expected[1])


@pytest.mark.parametrize("slow", [(0,), (1,), (0, 1)])
def test_dispatch_chosen_by_measured_times_leaves_the_bits_as_they_are(slow):
    # Calls of 1 ms keep threads, short ones go over to one dispatcher.
    expected = train(model(), dispatch="serial")
    layers = model()
    for stage in slow:
        layers[3 * stage].register_forward_hook(lambda *_: time.sleep(0.001))
    pipe = make_pipe(layers, 2, 4, dispatch="auto")
    x, targets = batch()
    for _ in range(4):
        layers.zero_grad()
        with casting():
            loss = loss_of(pipe(x), targets)
        loss.backward()
        assert torch.equal(loss, expected[0])
        assert_same_bits(grads(layers), expected[1])
        assert pipe.current_dispatch() == "threads"
    pipe.close()


def test_one_stage_and_one_microbatch_train_exactly_as_the_plain_model():
    layers, plain = model(), model()
    x, targets = batch()
    loss, found = train(layers, 1, 1)
    with casting():
        expected = loss_of(plain(x), targets)
    expected.backward()
    assert torch.equal(loss, expected)
    assert_same_bits(found, grads(plain))


@every_mode
@every_dispatch
@every_schedule
def test_casts_serve_neither_changed_weights_nor_a_later_pass(schedule, dispatch, mode):
    options = {"schedule": schedule, "dispatch": dispatch, "mode": mode}
    layers, fresh = model(), model()
    with torch.no_grad():
        for p in fresh.parameters():
            p.mul_(1.5)
    with casting():
        expected = train(fresh, **options)
    with casting():  # one region: no cast is dropped before its end
        train(layers, **options)
        with torch.no_grad():
            for p in layers.parameters():
                p.mul_(1.5)
        pipe = make_pipe(layers, 2, 4, dispatch=dispatch)
        with torch.no_grad():
            pipe(batch()[0])
        layers.zero_grad()
        loss, found = train(layers, **options)
    pipe.close()
    assert torch.equal(loss, expected[0])
    assert_same_bits(found, expected[1])


@every_mode
@every_dispatch
def test_the_callers_cache_is_as_it_was_after_a_call(dispatch, mode):
    seen = []

    def look(x):
        seen.append(torch.is_autocast_cache_enabled())
        return x

    layers = nn.Sequential(nn.Linear(8, 8), Functional(look))
    pipe = make_pipe(layers, 2, 4, mode, dispatch=dispatch)
    with casting():
        y = pipe(batch()[0])
        assert torch.is_autocast_cache_enabled()
    y.float().sum().backward()
    assert torch.is_autocast_cache_enabled()
    pipe.close()
    assert set(seen) == {False}


def test_calls_of_map_keep_the_callers_cache_flag():
    with Workers(2) as workers, casting(cache_enabled=False):
        seen = workers.map(lambda _: torch.is_autocast_cache_enabled(), range(4))
    assert seen == [False] * 4
