"""Context variables of the caller hold in the layers, and compiled layers train."""

import contextlib
import contextvars
import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, is_recomputing

from .models import MODES, Functional, grads, make_pipe

every_dispatch = pytest.mark.parametrize("dispatch", ["serial", "threads", "auto"])
every_mode = pytest.mark.parametrize("mode", MODES)
LOSSES = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
NUM_AGAIN = {"never": 0, "except_last": 2, "always": 3}
VALUE = contextvars.ContextVar("VALUE", default="unset")


@contextlib.contextmanager
def setting(value):
    token = VALUE.set(value)
    try:
        yield
    finally:
        VALUE.reset(token)


class Watch:
    """Notes the value that its layers see, and which pass they see it in."""

    def __init__(self):
        self.seen = {"forward": [], "again": [], "backward": []}
        watch = self

        class Note(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                watch.seen["backward"].append(VALUE.get())
                return grad * 2

        def fn(x):
            self.seen["again" if is_recomputing() else "forward"].append(VALUE.get())
            return Note.apply(x)

        self.layers = nn.Sequential(Functional(fn), Functional(fn))


def mean_square(output, targets):
    return ((output - targets) ** 2).mean()


@every_mode
@every_dispatch
def test_layers_see_the_values_of_the_call_and_nodes_those_of_backward(mode, dispatch):
    watch = Watch()
    pipe = make_pipe(watch.layers, 2, 3, mode, dispatch=dispatch)
    x = torch.ones(3, 2, requires_grad=True)
    for number, (of_backward, expected) in enumerate(
        [(setting("backward"), "backward"), (contextlib.nullcontext(), "unset")], 1
    ):
        with setting(f"call {number}"):
            loss = pipe(x).sum()
        with of_backward:
            loss.backward()
        assert watch.seen["forward"] == [f"call {number}"] * 6
        assert watch.seen["again"] == [f"call {number}"] * 2 * NUM_AGAIN[mode]
        assert watch.seen["backward"] == [expected] * 6
        for seen in watch.seen.values():
            seen.clear()
    assert VALUE.get() == "unset"
    assert torch.equal(x.grad, torch.full((3, 2), 8.0))
    pipe.close()


@LOSSES
@every_mode
@every_dispatch
def test_schedules_with_a_loss_run_in_the_values_of_the_call(schedule, mode, dispatch):
    watch, seen_by_loss = Watch(), []

    def loss(output, targets):
        seen_by_loss.append(VALUE.get())
        return mean_square(output, targets)

    pipe = make_pipe(
        watch.layers, 2, 3, mode, dispatch=dispatch, schedule=schedule, loss=loss
    )
    num_again = NUM_AGAIN[mode]
    x = torch.ones(3, 2, requires_grad=True)
    with setting("call"):
        found = pipe(x, targets=torch.zeros(3, 2))
    found.backward()
    assert watch.seen["forward"] == ["call"] * 6
    assert watch.seen["again"] == ["call"] * 2 * num_again
    assert watch.seen["backward"] == ["call"] * 6
    assert seen_by_loss == ["call"] * (3 + num_again)
    pipe.close()


@every_dispatch
def test_failure_in_a_layer_leaves_the_callers_values_in_force(dispatch):
    def fail(x):
        VALUE.set("layer")
        raise KeyError("x")

    pipe = make_pipe(
        nn.Sequential(Functional(lambda x: x), Functional(fail)), 2, 2, "always"
    )
    with setting("call"):
        with pytest.raises(KeyError):
            pipe(torch.ones(2, 2, requires_grad=True))
    assert VALUE.get() == "unset"
    pipe.close()


# --- compiled layers -----------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, x):
        return x + self.inner(x)


@pytest.fixture
def compiled():
    """What compiles a layer."""
    torch._dynamo.reset()
    try:
        torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2))
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {error}")
    yield lambda layer: torch.compile(layer, backend="aot_eager")
    torch._dynamo.reset()


OPTIONS = {
    "gpipe": {},
    "never": {"checkpoint": "never"},
    "1f1b": {"schedule": "1f1b", "loss": mean_square},
}


@every_dispatch
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_compiled_layers_train_like_the_plain_model(compiled, dispatch, options):
    # Backward of a compiled layer enters the context that torch keeps for it.
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(256) for _ in range(4)])
    layers = copy.deepcopy(plain)
    pipe = Pipe(
        nn.Sequential(*map(compiled, layers)),
        8,
        return_tensors=True,
        dispatch=dispatch,
        **options,
    )
    assert pipe.num_stages == 4
    x, targets = torch.randn(32, 256), torch.randn(32, 256)
    models = (plain, layers)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for _ in range(4):
        mean_square(plain(x), targets).backward()
        if "loss" in options:
            pipe(x, targets=targets).backward()
        else:
            mean_square(pipe(x), targets).backward()
        torch.testing.assert_close(grads(layers), grads(plain), rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pipe.close()
