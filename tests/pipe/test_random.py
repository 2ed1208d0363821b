"""Keyed random draws."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipetransformer.pipe import Workers, draw_scope, is_recomputing
from tests.support.pipe_draws import FallbackScope, force_fallback, keyed_draws_work

from .models import MODES, Functional, even_cuts, make_pipe


def noisy(num_layers=4, width=6):
    layers = []
    for _ in range(num_layers):
        layers.append(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)))
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def workers():
    with Workers(4) as workers:
        yield workers


def test_mechanism_works_on_this_torch():
    assert keyed_draws_work()


PROBE = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from pipetransformer.pipe import keyed_draws_work
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return {action}
with Mode():
    first = keyed_draws_work()
assert first and keyed_draws_work()
"""

FAKE = """
import torch
from torch._subclasses import FakeTensorMode
from pipetransformer.pipe import keyed_draws_work
with FakeTensorMode():
    first = keyed_draws_work()
assert first and keyed_draws_work()
"""

VMAP = """
import torch
from pipetransformer.pipe import keyed_draws_work
seen = []
def call(x):
    seen.append(keyed_draws_work())
    return x
torch.func.vmap(call)(torch.ones(2))
assert seen == [True] and keyed_draws_work()
"""

IN_FORCE = {
    "a mode": PROBE.format(action="function(*args, **kwargs or {})"),
    "a mode that raises": PROBE.format(action="1 / 0"),
    "FakeTensorMode": FAKE,
    "vmap": VMAP,
    "a default dtype": """
import torch
from pipetransformer.pipe import keyed_draws_work
torch.set_default_dtype(torch.float16)
assert keyed_draws_work()
""",
}


def in_new_process(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("code", IN_FORCE.values(), ids=IN_FORCE.keys())
def test_what_is_in_force_at_the_first_call_decides_nothing(code):
    assert "keyed draws" not in in_new_process(code)


BROKEN = """
import torch
from pipetransformer.pipe import keyed_draws_work
def draw(tensor, *args, **kwargs):
    {body}
    return tensor
library = torch.library.Library("aten", "IMPL")
library.impl("uniform_", draw, "CPU")
assert not keyed_draws_work()
library._destroy()

assert keyed_draws_work() is {again}
"""


def test_draws_without_keys_are_warned_of():
    code = BROKEN.format(body="tensor.zero_()", again=False)
    warned = in_new_process(code)
    assert warned.count("keyed draws are not available with this torch") == 1
    assert "not repeated by their keys" in warned


def test_an_exception_of_the_first_probe_is_warned_of_and_not_kept():
    body = 'raise RuntimeError("no such draw")'
    warned = in_new_process(BROKEN.format(body=body, again=True))
    assert warned.count("keyed draws are not available with this torch") == 1
    assert "Exception raised from" not in warned


DRAWS = {
    "rand": lambda: torch.rand(6),
    "randn": lambda: torch.randn(6),
    "randperm": lambda: torch.randperm(20),
    "randint": lambda: torch.randint(1000, (6,)),
    "dropout": lambda: F.dropout(torch.ones(40), 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(40), 0.5, training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(40), training=True),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "init": lambda: nn.init.normal_(torch.empty(6)),
    "attention": lambda: F.scaled_dot_product_attention(
        *torch.ones(3, 1, 1, 8, 4), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_scope_repeats_draws_and_leaves_default_generator(name):
    draw = DRAWS[name]
    before = torch.get_rng_state()

    def scoped(seed=1, step=2, microbatch=3, layer=4, scope=draw_scope):
        with scope(seed, step, microbatch=microbatch, layer=layer):
            return draw()

    first = scoped()
    assert torch.equal(first, scoped())
    assert torch.equal(first, scoped(scope=FallbackScope))
    others = [scoped(seed=2), scoped(step=3), scoped(microbatch=4), scoped(layer=5)]
    assert not any(torch.equal(first, other) for other in others)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("scope", [draw_scope, FallbackScope])
def test_layer_switch_gives_that_layers_draws(scope):
    with scope(1, 0, microbatch=0) as draws:
        torch.rand(3)
        draws.set_layer(7)
        switched = torch.rand(3)
    with scope(1, 0, microbatch=0, layer=7):
        assert torch.equal(switched, torch.rand(3))


def test_scopes_nest_and_end_with_an_exception():
    with draw_scope(1, 0, microbatch=0):
        first = torch.rand(2)
        with pytest.raises(ValueError), draw_scope(2, 0, microbatch=0):
            raise ValueError
        second = torch.rand(2)
    with draw_scope(1, 0, microbatch=0):
        assert torch.equal(torch.rand(4), torch.cat([first, second]))


def test_given_generator_is_respected():
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(3, generator=generator)
    generator.manual_seed(5)
    with draw_scope(1, 0, microbatch=0):
        assert torch.equal(torch.rand(3, generator=generator), expected)


def test_draws_do_not_depend_on_stages_cuts_or_mode(workers):
    layers = noisy()
    x = torch.randn(8, 6)
    seen = []
    for num_stages in (1, 2, 3, 4):
        for mode in MODES:
            pipe = make_pipe(layers, num_stages, 4, mode, workers=workers, seed=9)
            pipe.set_draw_position(step=5, first_microbatch=8)
            layers.zero_grad()
            y = pipe(x)
            y.sum().backward()
            seen.append([y.detach(), *(p.grad for p in layers.parameters())])
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0])


def test_plain_single_stage_draws_like_a_pipeline(workers):
    layers = noisy()
    x = torch.randn(8, 6)
    results = []
    for num_stages in (1, 4):
        pipe = make_pipe(layers, num_stages, 1, workers=workers, seed=9)
        pipe.set_draw_position(step=5, first_microbatch=3)
        results.append(pipe(x))
    torch.testing.assert_close(results[0], results[1])


def test_draws_follow_step_microbatch_and_first_layer(workers):
    layers = noisy()
    x = torch.ones(2, 6)

    def out(step=0, first_microbatch=0, first_layer=0):
        pipe = make_pipe(layers, 2, 2, workers=workers, seed=1, first_layer=first_layer)
        pipe.set_draw_position(step=step, first_microbatch=first_microbatch)
        return pipe(x).detach()

    assert torch.equal(out(), out())
    assert not torch.equal(out(), out(step=1))
    assert not torch.equal(out(), out(first_layer=1))
    # The second micro-batch of one replica is the first of another.
    torch.testing.assert_close(out()[1], out(first_microbatch=1)[0])


@pytest.mark.parametrize("mode", MODES)
def test_manual_seed_reproduces_a_run_outside_the_engine(workers, mode):
    pipe = make_pipe(noisy(), 4, 4, mode, workers=workers)
    x = torch.randn(8, 6)
    torch.manual_seed(3)
    first, state = pipe(x), torch.get_rng_state()
    second = pipe(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(pipe(x), first)
    assert torch.equal(torch.get_rng_state(), state)
    first.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_recomputation_repeats_functional_draws(workers, mode):
    drop = Functional(lambda x: F.dropout(x, 0.5))
    layers = nn.Sequential(drop, drop.__class__(drop.fn))
    x = torch.ones(64, 40, requires_grad=True)
    pipe = make_pipe(layers, 2, 8, mode, workers=workers)
    y = pipe(x)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)


def test_all_draws_of_a_cell_repeat_when_recomputed(workers):
    draws = {False: [], True: []}

    def record(x):
        draws[is_recomputing()].append(torch.rand(3))
        return x * 1

    x = torch.ones(4, 2, requires_grad=True)
    pipe = make_pipe(nn.Sequential(Functional(record)), 1, 4, "always", workers=workers)
    pipe(x).sum().backward()
    assert torch.equal(torch.stack(draws[False]), torch.stack(draws[True][::-1]))
    assert even_cuts(1, 1) == [0, 1]


def test_fallback_gives_the_same_draws(workers, monkeypatch):
    x = torch.ones(8, 6)
    pipe = make_pipe(noisy(), 4, 4, "always", workers=workers, seed=9)
    pipe.set_draw_position(step=5, first_microbatch=0)
    keyed = pipe(x)
    force_fallback(monkeypatch)
    before = torch.get_rng_state()
    fallback = pipe(x)
    assert torch.equal(fallback, keyed)
    fallback.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_pipe_inside_a_fallback_scope_is_refused(workers, monkeypatch):
    force_fallback(monkeypatch)
    pipe = make_pipe(noisy(), 4, 4, "always", workers=workers)
    x = torch.ones(8, 6)
    loss = pipe(x).sum()
    with draw_scope(1, 2, microbatch=3):
        with pytest.raises(RuntimeError, match="expected a call outside any draw_sco"):
            pipe(x)
        with pytest.raises(RuntimeError, match="expected a call outside any draw_sco"):
            loss.backward()
    loss.backward()
