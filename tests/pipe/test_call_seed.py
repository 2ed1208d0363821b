"""What a call takes from the global random generators: one draw if a cell draws.

A call in which nothing draws leaves them bit for bit as they were, so a program that
draws its batches between steps sees the same batches with a pipe as without one.
"""

import random
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipetransformer.pipe import (
    GPipe,
    Pipe,
    Workers,
    balance_by_time,
    draw_scope,
    is_recomputing,
    strict,
)
from tests.support.pipe_draws import FallbackScope, force_fallback

from .models import MODES, Functional, make_pipe

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
DISPATCHES = ("serial", "threads", "auto")
SHAPES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 4)]  # K, M
TIMEOUT_S = 60
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def workers():
    with Workers(4) as workers:
        yield workers


@pytest.fixture(params=["keyed", "fallback"])
def mechanism(request, monkeypatch):
    if request.param == "fallback":
        force_fallback(monkeypatch)
    return request.param


def next_draw(generator=None):
    """Take one 64-bit draw, the smallest that a CPU generator gives."""
    drawn = torch.empty((), dtype=torch.int64)
    return drawn.random_(-(2**63), None, generator=generator).item() % 2**64


def after(state, draws):
    """The state that so many 64-bit draws make of one, and the last draw."""
    generator = torch.Generator()
    generator.set_state(state)
    drawn = [next_draw(generator) for _ in range(draws)]
    return generator.get_state(), drawn[-1] if drawn else None


def global_states():
    python, (name, words, *rest) = random.getstate(), numpy.random.get_state()
    return torch.get_rng_state(), (python, name, words.tobytes(), rest)


class Taken:
    """Counts the draws that were taken from the default generator since it was made."""

    def __init__(self):
        self.torch, self.others = global_states()

    def is_(self, draws):
        expected, _ = after(self.torch, draws)
        now, others = global_states()
        return torch.equal(now, expected) and others == self.others

    def seed(self):
        return after(self.torch, 1)[1]


def silent(x):
    """Call all kinds of operations that could draw, and do not."""
    x = F.rrelu(x, training=False)
    x = F.dropout(F.dropout(x, 0.0), 0.5, training=False)
    assert torch.rand(0).numel() == 0
    x = x + torch.rand(1, generator=torch.Generator().manual_seed(1)).to(x)
    y = x.reshape(1, 1, *x.shape)
    return F.scaled_dot_product_attention(y, y, y, dropout_p=0.0).reshape(x.shape)


def noisy(x):
    return F.dropout(x, 0.5) + torch.randn(1, dtype=x.dtype)


def noisy_once(x):
    """Draw in the micro-batch that holds row 7 only."""
    return noisy(x) if (x.detach()[:, 0] == 7).any() else x * 1


def keep_first(fn):
    """Leave the first column, which holds the row's number, as it is."""
    return lambda x: torch.cat([x[:, :1], fn(x[:, 1:])], 1)


def model(fn, *, at):
    """Four layers with parameters; those `at` call ``fn`` on what they compute."""
    torch.manual_seed(0)
    layers = []
    for k in range(4):
        linear = nn.Linear(5, 5, dtype=torch.double)
        fns = [linear, *([fn] if k in at else [])]
        layers.append(Numbered(fns, whole=fn is noisy_once))
    return nn.Sequential(*layers)


class Numbered(nn.Module):
    def __init__(self, fns, *, whole):
        super().__init__()
        self.linear, *self.fns = fns
        self.whole = whole

    def forward(self, x):
        x = keep_first(self.linear)(x)
        for fn in self.fns:
            x = fn(x) if self.whole else keep_first(fn)(x)
        return x


def rows():
    x = torch.linspace(-1, 1, 8 * 6, dtype=torch.double).reshape(8, 6)
    x[:, 0] = torch.arange(8)
    return x.requires_grad_()


def mean(output, targets):
    return ((output - targets) ** 2).mean()


def build(layers, stages, microbatches, mode, schedule, dispatch, workers, **options):
    loss = {"loss": mean} if schedule != "gpipe" else {}
    return make_pipe(
        layers,
        stages,
        microbatches,
        mode,
        schedule=schedule,
        dispatch=dispatch,
        workers=workers,
        **loss,
        **options,
    )


def call(pipe, x):
    targets = {"targets": torch.zeros_like(x)} if pipe.schedule != "gpipe" else {}
    return pipe(x, **targets)


@every_mode
@every_dispatch
@every_schedule
def test_call_in_which_nothing_draws_takes_nothing(
    workers, schedule, dispatch, mode, mechanism
):
    layers = model(silent, at=range(4))
    for stages, microbatches in SHAPES:
        pipe = build(layers, stages, microbatches, mode, schedule, dispatch, workers)
        torch.manual_seed(5)
        taken = Taken()
        y = call(pipe, rows())
        assert taken.is_(0)
        y.sum().backward()
        assert taken.is_(0)
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with context():
                call(pipe.train(), rows())
                call(pipe.eval(), rows())
        with torch.no_grad():
            if schedule == "gpipe":
                pipe.run([(rows(),), (rows(),)])
        assert taken.is_(0)


@pytest.mark.parametrize(
    "layers",
    [
        model(noisy, at=range(4)),
        model(noisy, at=[0]),
        model(noisy, at=[3]),
        model(noisy_once, at=[2]),
    ],
    ids=["all", "first", "last", "one micro-batch"],
)
@every_dispatch
@every_schedule
def test_call_in_which_a_cell_draws_takes_one_draw_and_its_bits(
    workers, schedule, dispatch, layers, mechanism
):
    for mode in MODES:
        for stages, microbatches in SHAPES:
            shape = (stages, microbatches, mode, schedule, dispatch, workers)
            torch.manual_seed(5)
            taken, x = Taken(), rows()
            y = call(build(layers, *shape), x)
            assert taken.is_(1), shape
            y.sum().backward()
            assert taken.is_(1), shape
            given = build(layers, *shape, seed=taken.seed())
            given.set_draw_position(step=0, first_microbatch=0)
            same = rows()
            other = call(given, same)
            other.sum().backward()
            assert torch.equal(y, other), shape
            assert torch.equal(x.grad, same.grad), shape
            assert taken.is_(1), shape


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_call_without_gradients_takes_one_draw_too(workers, context, mechanism):
    pipe = make_pipe(model(noisy, at=[1]), 2, 2, workers=workers)
    for run in (lambda: pipe(rows()), lambda: pipe.run([(rows(),)])):
        taken = Taken()
        with context():
            run()
        assert taken.is_(1)


@pytest.mark.parametrize("chunks", [1, 4])
@every_mode
def test_gpipe_takes_as_pipe_does(mode, chunks):
    for fn, draws in ((silent, 0), (noisy, 1)):
        devices = [torch.device("cpu")] * 2
        layers = model(fn, at=[1])
        pipe = GPipe(layers, [2, 2], devices=devices, chunks=chunks, checkpoint=mode)
        taken = Taken()
        y = pipe(rows())
        assert taken.is_(draws)
        y.sum().backward()
        assert taken.is_(draws)


def test_construction_and_balancing_take_nothing():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    taken = Taken()
    balance = balance_by_time(
        2, layers, torch.ones(8, 4), timeout=0.01, device=torch.device("cpu")
    )
    Pipe(layers, chunks=2, deferred_batch_norm=True)
    GPipe(layers, balance, devices=["cpu", "cpu"], chunks=2, deferred_batch_norm=True)
    assert taken.is_(0)


@every_mode
def test_strict_call_in_which_nothing_draws_takes_nothing(mode, monkeypatch):
    monkeypatch.setattr("pipetransformer.pipe.pipe.check_rpc", lambda: None)
    strict.set_strict(True)
    try:
        pipe = Pipe(model(silent, at=range(4)), chunks=4, checkpoint=mode)
    finally:
        strict.set_strict(False)
    taken = Taken()
    pipe(rows()).local_value().sum().backward()
    assert taken.is_(0)


def test_repeated_calls_take_one_draw_each(workers, mechanism):
    pipe = make_pipe(model(noisy, at=[1]), 4, 4, "always", workers=workers)
    taken = Taken()
    outputs = [pipe(rows()) for _ in range(3)]
    assert taken.is_(3)
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    for y in outputs:
        y.sum().backward()
    assert taken.is_(3)


# Nested pipes: the inner one takes from the cell in which it was called.


def nested(inner, *, dispatch="threads", mode="always"):
    def through(x):
        return torch.rand(1) + inner(x.float()).to(x) + torch.rand(1)

    return build(model(through, at=[1, 2]), 2, 2, mode, "gpipe", dispatch, None)


@every_dispatch
@pytest.mark.parametrize("fn", [silent, noisy])
def test_pipe_in_a_pipe_takes_from_its_cell(fn, dispatch):
    layers = nn.Sequential(*(Functional(fn) for _ in range(3)))
    inner = make_pipe(layers, 3, 2, "always", dispatch=dispatch)
    outputs = []
    for outer_dispatch in ("serial", "threads"):
        pipe = nested(inner, dispatch=outer_dispatch)
        torch.manual_seed(5)
        taken, x = Taken(), rows()
        y = pipe(x)
        y.sum().backward()
        assert taken.is_(1)
        outputs += [y.detach(), x.grad]
        pipe.close()
    inner.close()
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@every_dispatch
def test_pipe_in_a_pipe_in_which_nothing_draws_takes_nothing(dispatch):
    layers = nn.Sequential(*(Functional(silent) for _ in range(3)))
    inner = make_pipe(layers, 3, 2, "always", dispatch=dispatch)
    pipe = build(
        model(lambda x: inner(x), at=[1]), 2, 2, "always", "gpipe", dispatch, None
    )
    taken = Taken()
    pipe(rows()).sum().backward()
    assert taken.is_(0)
    pipe.close()
    inner.close()


@every_dispatch
def test_draw_in_an_inner_pipe_alone_is_one_of_the_outer_call(dispatch):
    layers = nn.Sequential(*(Functional(noisy) for _ in range(3)))
    inner = make_pipe(layers, 3, 2, "always", dispatch=dispatch)
    outer = model(lambda x: inner(x), at=[1])
    pipe = build(outer, 2, 2, "always", "gpipe", dispatch, None)
    taken, x = Taken(), rows()
    y = pipe(x)
    assert taken.is_(1)
    y.sum().backward()
    assert taken.is_(1)
    given = build(outer, 2, 2, "always", "gpipe", dispatch, None, seed=taken.seed())
    given.set_draw_position(step=0, first_microbatch=0)
    assert torch.equal(given(rows()), y)
    for each in (pipe, given, inner):
        each.close()


@pytest.mark.parametrize("scope", [draw_scope, FallbackScope])
def test_inner_call_moves_its_cells_generator_by_its_draw_only(scope):
    def between(action):
        with scope(1, 2, microbatch=3, layer=4):
            return torch.rand(2), action(), torch.rand(2)

    def inner(fn):
        return make_pipe(nn.Sequential(Functional(fn)), 1, 1)

    x = torch.ones(2, 3)
    plain = between(lambda: None)
    untouched = between(lambda: inner(silent)(x))
    moved = between(next_draw)
    drawn = between(lambda: inner(noisy)(x))
    assert torch.equal(torch.cat(untouched[::2]), torch.cat(plain[::2]))
    assert torch.equal(torch.cat(drawn[::2]), torch.cat(moved[::2]))
    assert not torch.equal(drawn[2], plain[2])
    with draw_scope(moved[1], 0, microbatch=0):
        assert torch.equal(drawn[1], noisy(x))


# Draws at unusual moments.


def noisy_when_recomputed(x):
    return x * (1 + torch.rand(1, dtype=x.dtype)) if is_recomputing() else x * 1


@every_dispatch
def test_first_draw_in_the_recomputation_takes_the_draw_then(dispatch, mechanism):
    pipe = build(
        model(noisy_when_recomputed, at=[0, 2]), 4, 4, "always", "gpipe", dispatch, None
    )
    torch.manual_seed(5)
    taken = Taken()
    y = pipe(rows())
    assert taken.is_(0)
    next_draw()  # the caller's own
    y.sum().backward(retain_graph=True)
    assert taken.is_(2)
    y.sum().backward()
    assert taken.is_(2)
    pipe.close()


def test_first_draw_in_the_recomputation_of_an_inner_pipe_is_the_outer_calls():
    inner = make_pipe(
        nn.Sequential(*(Functional(noisy_when_recomputed) for _ in range(2))),
        2,
        2,
        "always",
    )
    pipe = make_pipe(model(lambda x: inner(x), at=[0, 1]), 2, 2, "never")
    taken = Taken()
    y = pipe(rows())
    assert taken.is_(0)
    y.sum().backward()
    assert taken.is_(1)
    pipe.close()
    inner.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@every_dispatch
def test_first_draw_in_a_recomputation_within_the_call_is_taken_once(
    schedule, dispatch, mechanism
):
    layers = model(noisy_when_recomputed, at=[0, 2])
    pipe = build(layers, 4, 4, "always", schedule, dispatch, None)
    taken = Taken()
    call(pipe, rows()).backward()
    assert taken.is_(1)
    pipe.close()


def fail(_):
    raise ArithmeticError("planted")


@every_dispatch
@every_schedule
def test_failed_call_takes_what_it_has_drawn(workers, schedule, dispatch, mechanism):
    for first, draws in ((noisy, 1), (silent, 0)):
        layers = nn.Sequential(Functional(first), Functional(fail))
        pipe = build(layers, 2, 3, "always", schedule, dispatch, workers)
        taken = Taken()
        with pytest.raises(ArithmeticError, match="planted"):
            call(pipe, rows())
        assert taken.is_(draws)


def test_failed_call_of_a_lone_stage_takes_what_it_has_drawn(mechanism):
    for first, draws in ((noisy, 1), (silent, 0)):
        pipe = make_pipe(nn.Sequential(Functional(first), Functional(fail)), 1, 1)
        taken = Taken()
        with pytest.raises(ArithmeticError, match="planted"):
            pipe(rows())
        assert taken.is_(draws)


def test_draw_scope_without_seed_takes_one_draw_if_something_draws(mechanism):
    taken = Taken()
    with draw_scope(None, 3, microbatch=1, layer=2):
        torch.zeros(3).normal_(generator=torch.Generator())
    assert taken.is_(0)
    with draw_scope(None, 3, microbatch=1, layer=2):
        drawn = torch.rand(3)
    assert taken.is_(1)
    with draw_scope(taken.seed(), 3, microbatch=1, layer=2):
        assert torch.equal(drawn, torch.rand(3))
    assert taken.is_(1)


@every_schedule
@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_what_layers_do_to_the_default_generator_changes_no_draw(mode, schedule):
    def restless(x):
        number = int(x.detach()[0, 0])
        torch.manual_seed(number)
        torch.rand(number, generator=torch.default_generator)
        return keep_first(noisy)(x)

    layers = nn.Sequential(*(Functional(restless) for _ in range(3)))
    seen = []
    for dispatch in DISPATCHES:
        pipe = build(layers, 3, 4, mode, schedule, dispatch, None)
        torch.manual_seed(5)
        taken, x = Taken(), rows()
        value = call(pipe, x)
        value.sum().backward()
        given = build(layers, 3, 4, mode, schedule, dispatch, None, seed=taken.seed())
        given.set_draw_position(step=0, first_microbatch=0)
        assert torch.equal(call(given, rows()), value)
        seen += [value.detach(), x.grad]
        pipe.close()
        given.close()
    for k in (2, 4):
        assert torch.equal(seen[k], seen[0])
        assert torch.equal(seen[k + 1], seen[1])


def in_threads(*actions):
    results, errors = {}, []

    def run(k, action):
        try:
            results[k] = action()
        except BaseException as error:  # for the main thread
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=item, daemon=True)
        for item in enumerate(actions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not errors, errors
    return [results[k] for k in range(len(actions))]


def test_calls_of_several_threads_at_once_draw_differently():
    meeting = threading.Barrier(3, timeout=TIMEOUT_S)

    def meet(x):
        if x[0, 0] == 0:
            meeting.wait()  # all have begun, none has drawn
        y = F.dropout(x, 0.5)
        if x[0, 0] == 0:
            meeting.wait()  # all have drawn, none has ended
        return y

    pipes = [make_pipe(nn.Sequential(Functional(meet)), 1, 2) for _ in range(3)]
    x = torch.ones(2, 200)
    x[0, 0] = 0
    torch.manual_seed(5)
    taken = Taken()
    outputs = in_threads(*(lambda pipe=pipe: pipe(x) for pipe in pipes))
    assert taken.is_(3)
    for k in range(3):
        assert not torch.equal(outputs[k], outputs[k - 1])
    alone = make_pipe(nn.Sequential(Functional(lambda x: F.dropout(x, 0.5))), 1, 2)
    torch.manual_seed(5)
    expected = alone(x)
    assert sum(torch.equal(expected, output) for output in outputs) == 1
    for pipe in (*pipes, alone):
        pipe.close()


def test_call_that_begins_while_another_has_drawn_draws_differently():
    drawn, over = threading.Event(), threading.Event()

    def wait(x):
        y = F.dropout(x, 0.5)
        drawn.set()
        assert over.wait(TIMEOUT_S)
        return y

    waiting = make_pipe(nn.Sequential(Functional(wait)), 1, 2)
    pipe = make_pipe(nn.Sequential(Functional(lambda x: F.dropout(x, 0.5))), 1, 2)
    x = torch.ones(2, 200)

    def meanwhile():
        assert drawn.wait(TIMEOUT_S)
        try:
            return pipe(x)
        finally:
            over.set()

    torch.manual_seed(5)
    taken = Taken()
    first, second = in_threads(lambda: waiting(x), meanwhile)
    assert taken.is_(2)
    assert not torch.equal(first, second)
    third = pipe(x)
    torch.manual_seed(5)
    assert torch.equal(pipe(x), first)
    next_draw()
    assert torch.equal(pipe(x), third)
    waiting.close()
    pipe.close()


def test_seeds_differ_whoever_claimed_one_without_drawing_in_between():
    begun, go, drawn, over = (threading.Event() for _ in range(4))

    def first():
        with draw_scope(None, 0, microbatch=0):
            begun.set()
            assert go.wait(TIMEOUT_S)
            found = torch.rand(3)
            drawn.set()
            assert over.wait(TIMEOUT_S)
            return found

    def meanwhile():
        assert begun.wait(TIMEOUT_S)
        try:
            with draw_scope(None, 0, microbatch=0):
                torch.rand(0)  # asks for a seed, and takes nothing
            go.set()
            assert drawn.wait(TIMEOUT_S)
            with draw_scope(None, 0, microbatch=0):
                return torch.rand(3)
        finally:
            go.set()
            over.set()

    torch.manual_seed(5)
    taken = Taken()
    found = in_threads(first, meanwhile)
    assert taken.is_(2)
    assert not torch.equal(*found)


def test_call_in_another_thread_that_does_not_draw_changes_no_draw():
    begun, drawn = threading.Event(), threading.Event()

    def watch(x):
        begun.set()
        assert drawn.wait(TIMEOUT_S)
        return silent(x)

    watching = make_pipe(nn.Sequential(Functional(watch)), 1, 2)
    pipe = make_pipe(model(noisy, at=[1]), 2, 2)

    def train():
        outputs = [pipe(rows()) for _ in range(3)]
        drawn.set()
        return outputs

    def train_beside():
        assert begun.wait(TIMEOUT_S)
        return train()

    torch.manual_seed(5)
    expected = train()
    drawn.clear()
    torch.manual_seed(5)
    taken = Taken()
    _, outputs = in_threads(lambda: watching(rows()), train_beside)
    assert taken.is_(3)
    for output, other in zip(outputs, expected, strict=True):
        assert torch.equal(output, other)
    watching.close()
    pipe.close()


@every_mode
def test_program_that_draws_between_steps_draws_as_without_a_pipe(workers, mode):
    torch.manual_seed(5)
    expected = [torch.randn(4) for _ in range(4)]
    pipe = make_pipe(model(silent, at=[1]), 3, 4, mode, workers=workers)
    torch.manual_seed(5)
    for batch in expected:
        assert torch.equal(torch.randn(4), batch)
        pipe(rows()).sum().backward()
