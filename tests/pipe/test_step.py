"""1F1B and ZB-H1: forward, loss and backward in one schedule, the same gradients."""

import collections
import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import NoChunk, Pipe

from .models import MODES, Functional, dense, even_cuts, grads, linears

SCHEDULES = ("1f1b", "zb-h1")
DISPATCHES = ("serial", "threads")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def mse(output, target):
    return ((output - target) ** 2).mean()


def data(rows=7, width=5):
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(rows, width, dtype=torch.double, generator=generator),
        torch.randn(rows, width, dtype=torch.double, generator=generator),
    )


def make(layers, stages, m, schedule, mode="never", loss=mse, **options):
    return Pipe.from_plan(
        layers,
        cuts=even_cuts(len(layers), stages),
        num_microbatches=m,
        checkpoint=mode,
        schedule=schedule,
        loss=loss,
        **options,
    )


def assert_same_step(layers, pipe, x, target, loss=mse):
    plain = copy.deepcopy(layers)
    a = x.detach().clone().requires_grad_(x.requires_grad)
    b = x.detach().clone().requires_grad_(x.requires_grad)
    expected = loss(plain(a), target)
    expected.backward()
    actual = pipe(b, targets=target)
    assert all(p.grad is None for p in layers.parameters()), "not delivered yet"
    actual.backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(grads(layers), grads(plain))
    torch.testing.assert_close(b.grad, a.grad)
    return pipe


@every_schedule
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 3, 7])
def test_step_gives_the_plain_models_gradients(schedule, mode, dispatch, stages, m):
    layers = dense()
    x, target = data()
    pipe = make(layers, stages, m, schedule, mode, dispatch=dispatch)
    assert_same_step(layers, pipe, x.requires_grad_(m % 2 == 0), target)
    pipe.close()


@every_schedule
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (2,), (3,), (1, 3)])
def test_frozen_stages_just_work(schedule, mode, frozen):
    layers = dense()
    for k in frozen:
        layers[k].requires_grad_(False)
    x, target = data()
    pipe = make(layers, 4, 3, schedule, mode)
    assert_same_step(layers, pipe, x, target)
    pipe.close()


@every_schedule
def test_all_frozen_gives_a_loss_without_history(schedule):
    layers = dense().requires_grad_(False)
    x, target = data()
    pipe = make(layers, 2, 3, schedule)
    loss = pipe(x, targets=target)
    pipe.close()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, mse(layers(x), target))


@every_schedule
@pytest.mark.parametrize("evaluates", [True, False], ids=["eval", "no_grad"])
def test_without_training_only_the_forward_runs(schedule, evaluates):
    layers = dense()
    passes = []
    layers.append(Functional(lambda x: passes.append(x.shape[0]) or x))
    x, target = data()
    pipe = make(layers, 2, 3, schedule, "always")
    if evaluates:
        pipe.eval()
        loss = pipe(x, targets=target)
    else:
        with torch.no_grad():
            loss = pipe(x, targets=target)
    pipe.close()
    assert not loss.requires_grad
    assert sorted(passes) == [2, 2, 3]
    torch.testing.assert_close(loss, mse(dense_output(layers, x), target))


def batched_grads(loss, parameters):
    return torch.autograd.grad(
        loss,
        parameters,
        torch.tensor([1.0, -0.5, 0.0], dtype=torch.double),
        is_grads_batched=True,
    )


@every_schedule
@pytest.mark.parametrize("dispatch", ["serial", "threads"])
def test_gradients_of_several_scales_at_once(schedule, dispatch):
    layers = dense()
    x, target = data()
    pipe = make(layers, 2, 3, schedule, dispatch=dispatch)
    loss = pipe(x, targets=target)
    mine = batched_grads(loss, list(layers.parameters()))
    plain = batched_grads(mse(layers(x), target), list(layers.parameters()))
    torch.testing.assert_close(mine, plain)
    pipe.close()


def dense_output(layers, x):
    with torch.no_grad():
        for layer in list(layers)[:-1]:
            x = layer(x)
    return x


@every_schedule
def test_backward_delivers_scaled_by_the_incoming_gradient(schedule):
    layers = dense()
    x, target = data()
    pipe = make(layers, 2, 3, schedule)
    (pipe(x, targets=target) * 4).backward()
    scaled = grads(layers)
    layers.zero_grad()
    loss = pipe(x, targets=target)
    loss.backward(retain_graph=True)
    once = grads(layers)
    loss.backward()
    torch.testing.assert_close(scaled, [4 * g for g in once])
    torch.testing.assert_close(grads(layers), [2 * g for g in once])
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="create_graph=False"):
        pipe(x, targets=target).backward(create_graph=True)
    pipe.close()


@every_schedule
def test_hooks_see_each_parameter_once_with_the_whole_gradient(schedule):
    layers = dense()
    x, target = data()
    pipe = make(layers, 4, 7, schedule)
    seen = []
    for p in layers.parameters():
        p.register_hook(lambda g: seen.append("hook"))
        p.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    pipe(x, targets=target).backward()
    pipe.close()
    count = len(list(layers.parameters()))
    assert seen.count("hook") == seen.count("post") == count


@every_schedule
def test_parameter_shared_by_stages_gets_the_sum(schedule):
    layers = nn.Sequential(*linears(4))
    layers[3].weight = layers[0].weight
    x, target = data()
    pipe = make(layers, 4, 3, schedule)
    assert_same_step(layers, pipe, x, target)
    pipe.close()


class Squared(torch.autograd.Function):
    """Counts its backward calls; holds a parameter and an input."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx, g):
        Squared.calls += 1
        x, w = ctx.saved_tensors
        return 2 * x * w * g, (x * x * g).sum(0)


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 5, dtype=torch.double))

    def forward(self, x):
        return Squared.apply(x, self.w)


def test_custom_function_runs_once_per_cell_when_backward_is_split():
    layers = nn.Sequential(*linears(2), WithFunction(), *linears(1))
    x, target = data()
    pipe = make(layers, 2, 3, "zb-h1")
    plain = copy.deepcopy(layers)
    mse(plain(x), target).backward()
    Squared.calls = 0
    pipe(x, targets=target).backward()
    assert Squared.calls == 3
    torch.testing.assert_close(grads(layers), grads(plain))
    pipe.close()


def test_tensor_hooks_run_once_per_cell_when_backward_is_split():
    seen = []

    class Hooked(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda g: seen.append(1) or 2 * g)
            return y

    layers = nn.Sequential(*linears(2), Hooked(5, 5, dtype=torch.double), *linears(1))
    x, target = data()
    plain = copy.deepcopy(layers)
    mse(plain(x), target).backward()
    assert len(seen) == 1
    pipe = make(layers, 2, 3, "zb-h1")
    pipe(x, targets=target).backward()
    assert len(seen) == 1 + 3
    torch.testing.assert_close(grads(layers), grads(plain))
    pipe.close()


def test_split_backward_computes_no_product_twice():
    """Matrix products of the backward: two per linear layer and micro-batch, with
    or without a split; one for the first layer, whose input needs no gradient."""
    counts = {}
    for schedule in SCHEDULES:
        layers = nn.Sequential(*linears(4))
        x, target = data()
        pipe = make(layers, 2, 3, schedule, dispatch="serial")
        with torch.profiler.profile() as profile:
            pipe(x, targets=target)
        counts[schedule] = sum(e.name == "aten::mm" for e in profile.events())
        pipe.close()
    assert counts == {"1f1b": 3 * 7, "zb-h1": 3 * 7}


@every_schedule
def test_targets_are_cut_like_the_inputs(schedule):
    seen = []

    def loss(output, targets):
        seen.append((output.shape[0], targets["y"].shape[0], targets["w"].shape[0]))
        return (targets["w"].sum() * (output - targets["y"]) ** 2).mean()

    layers = dense()
    x, y = data()
    w = torch.tensor([0.5, 1.5], dtype=torch.double)
    targets = {"y": y, "w": NoChunk(w), "scale": 3}
    pipe = make(layers, 2, 3, schedule, loss=loss)
    actual = pipe(x, targets=targets)
    pipe.close()
    assert sorted(seen) == [(2, 2, 2), (2, 2, 2), (3, 3, 2)]
    torch.testing.assert_close(actual, 2 * mse(layers(x), y))


@every_schedule
@pytest.mark.parametrize("failing", ["forward", "loss", "backward"])
def test_failure_reaches_the_caller_and_the_pipe_stays_usable(schedule, failing):
    armed = [True]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if armed[0] and failing == "backward":
                raise KeyError("cell")
            return g

    def layer(x):
        if armed[0] and failing == "forward":
            raise KeyError("cell")
        return Fails.apply(x)

    def loss(output, target):
        if armed[0] and failing == "loss":
            raise KeyError("cell")
        return mse(output, target)

    layers = nn.Sequential(*linears(2), Functional(layer), *linears(1))
    x, target = data()
    pipe = make(layers, 2, 3, schedule, loss=loss)
    with pytest.raises(KeyError, match="cell"):
        pipe(x, targets=target)
    armed[0] = False
    pipe(x, targets=target).backward()
    plain = copy.deepcopy(layers)
    plain.zero_grad()
    mse(plain(x), target).backward()
    torch.testing.assert_close(grads(layers), grads(plain))
    pipe.close()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"loss": None}, ValueError, "loss: expected loss=fn.* with '1f1b', got none"),
        ({"schedule": "gpipe"}, ValueError, "loss: expected none with 'gpipe', got f"),
        ({"schedule": "2f"}, ValueError, "schedule: expected one of .*, got '2f'"),
        ({"loss": 3}, TypeError, "loss: expected a function .*, got int"),
        ({"dispatch": "many"}, ValueError, "dispatch: expected one of .*, got 'many'"),
        (
            {"loss": nn.Linear(1, 1)},
            ValueError,
            "loss: expected no parameters that train, got Linear",
        ),
    ],
)
def test_wrong_settings_are_refused(change, error, message):
    settings = {"schedule": "1f1b", "loss": mse, **change}
    with pytest.raises(error, match=message):
        Pipe(dense(), 2, **settings)


def test_wrong_calls_are_refused():
    x, target = data()
    pipe = make(dense(), 2, 3, "1f1b")
    with pytest.raises(TypeError, match="targets: expected targets=.*, got none"):
        pipe(x)
    with pytest.raises(RuntimeError, match="Found different number of chunks"):
        pipe(x, targets=target[:2])
    with pytest.raises(ValueError, match="targets: expected as many rows, .* beside"):
        pipe(x, targets=target[: len(target) - 1])
    with pytest.raises(TypeError, match="targets: .* a UserDict with tensors"):
        pipe(x, targets=collections.UserDict(y=target))
    for value, got in [(lambda o, t: o, "shape"), (lambda o, t: 3.0, "float")]:
        other = make(dense(), 2, 3, "1f1b", loss=value)
        with pytest.raises(TypeError, match=f"loss: expected a floating.*got {got}"):
            other(x, targets=target)
        other.close()
    pipe.close()


def test_result_object_holds_the_loss():
    layers = dense()
    x, target = data()
    pipe = Pipe(layers, 3, schedule="1f1b", loss=mse)
    result = pipe(x, targets=target)
    torch.testing.assert_close(result.local_value(), mse(layers(x), target))
    result.backward()
    assert all(p.grad is not None for p in layers.parameters())
    pipe.close()
