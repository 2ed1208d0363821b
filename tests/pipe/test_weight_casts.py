"""Under autocast all micro-batches share the data of a weight's cast, unnoticed."""

import weakref

import pytest
import torch
from torch import nn

from .models import MODES, Functional, grads, make_pipe

WIDTH, ROWS, MICROBATCHES = 8, 12, 4
DISPATCHES = ("serial", "threads")

every_mode = pytest.mark.parametrize("mode", MODES)
every_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)
every_schedule = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])


def casting(cache=True):
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)


def loss_of(y, targets):
    return nn.functional.mse_loss(y.float(), targets)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, ROWS, WIDTH, generator=generator)


def build(layers, schedule="gpipe", **options):
    mode = options.pop("mode", "never")
    loss = None if schedule == "gpipe" else loss_of
    return make_pipe(
        layers, 2, MICROBATCHES, mode, schedule=schedule, loss=loss, **options
    )


def run(pipe, schedule="gpipe"):
    x, targets = data()
    if schedule == "gpipe":
        return loss_of(pipe(x), targets)
    return pipe(x, targets=targets)


def train(layers, cache, schedule="gpipe", **options):
    """Return the loss and the gradients of one batch."""
    pipe = build(layers, schedule, **options)
    with casting(cache):
        loss = run(pipe, schedule)
    loss.backward()
    pipe.close()
    return [loss.detach(), *grads(layers)]


def assert_same_bits(left, right):
    assert len(left) == len(right) > 1
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class OwnLeaf(nn.Module):
    """Casts a leaf that it makes for the length of a call; counts those alive."""

    def __init__(self):
        super().__init__()
        self.made, self.most = [], 0

    def forward(self, x):
        leaf = torch.ones(len(x), WIDTH, dtype=torch.float32).requires_grad_()
        self.made.append(weakref.ref(leaf))
        alive = sum(each() is not None for each in self.made)
        self.most = max(self.most, alive)
        return x + leaf @ torch.eye(WIDTH)


@every_dispatch
@pytest.mark.parametrize("trains", [True, False])
def test_leaves_that_a_layer_makes_are_no_weights_to_be_kept(trains, dispatch):
    own = OwnLeaf()
    first = nn.Linear(WIDTH, WIDTH).requires_grad_(trains)  # and own's is its stage
    layers = nn.Sequential(first, own, nn.Linear(WIDTH, WIDTH), nn.Tanh())
    found = train(layers, True, mode="always", dispatch=dispatch)
    # Where nothing before them trains, no gradient asks for a recomputation.
    assert len(own.made) == (2 if trains else 1) * MICROBATCHES
    # One, and that of the recomputation before, whose backward may go on.
    assert own.most <= 2
    plain = train(layers, False, mode="never", dispatch=dispatch)
    assert torch.equal(found[0], plain[0])


class Kept:
    """Keeps what cells save for backward, and where the casts of weights lie."""

    def __init__(self):
        self.casts = []

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        return self.hooks.__enter__()

    def __exit__(self, *failure):
        return self.hooks.__exit__(*failure)

    def pack(self, tensor):
        if tensor.dtype == torch.bfloat16 and tensor.shape == (WIDTH, WIDTH):
            self.casts.append(tensor)
        return tensor

    def places(self):
        return {tensor.data_ptr() for tensor in self.casts}


@every_mode
@every_dispatch
@every_schedule
@pytest.mark.parametrize("cache", [True, False])
def test_a_weight_is_cast_once_for_all_microbatches(cache, schedule, dispatch, mode):
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    options = {"schedule": schedule, "dispatch": dispatch, "mode": mode}
    pipe = build(layers, **options)
    kept = Kept()
    with kept, casting(cache):
        loss = run(pipe, schedule)
    loss.backward()
    pipe.close()
    # The first layer keeps none: no gradient goes on to the input. GPipe's backward
    # is a run of its own, with casts of its own where something is recomputed.
    assert len(kept.casts) >= 3 * MICROBATCHES
    runs = 2 if schedule == "gpipe" and mode != "never" else 1
    assert len(kept.places()) == (3 * runs if cache else len(kept.casts))


class Changes(nn.Module):
    """Changes its weight before each use, as spectral normalisation does."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.change(self.linear.weight)
        return y + self.linear(x)


def new_data(weight):
    weight.data = weight.detach() * 0.9


def in_place(weight):
    weight.mul_(0.9)


def unseen(weight):
    weight.data.mul_(0.9)


class OwnCast(nn.Module):
    """Casts its weight itself, and changes what it gets."""

    def __init__(self, enabled):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.enabled = enabled

    def forward(self, x):
        y = self.linear(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            own = self.linear.weight.to(torch.bfloat16)
        own = own.detach() if torch.is_grad_enabled() else own
        own.mul_(0)
        return self.linear(y) + own.sum()


class Penalty(nn.Module):
    """Differentiates in its forward, through the cast, and the result again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.enable_grad():
            z = torch.sin(self.linear(x).float()).pow(2).sum()
            slope = torch.autograd.grad(z, self.linear.weight, create_graph=True)[0]
        return self.linear(x).float() + slope.pow(2).mean(0)


class Looks(nn.Module):
    """Calls its layer in inference mode first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.inference_mode():
            scale = float(self.linear(x).float().abs().mean())
        return self.linear(x) * scale


class PerSample(nn.Module):
    """Calls its linear layer through torch.func."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        slope = torch.func.grad(lambda row: self.linear(row).float().sum())
        return self.linear(x) + torch.func.vmap(slope)(x.detach())


def tied():
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), nn.LayerNorm(WIDTH), last)


def around(make):
    return lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), make(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


ODD = {
    "changed in place": around(lambda: Changes(in_place)),
    "other data": around(lambda: Changes(new_data)),
    "own cast inside a region": around(lambda: OwnCast(True)),
    "own cast outside of autocast": around(lambda: OwnCast(False)),
    "differentiated within": around(Penalty),
    "inference mode within": around(Looks),
    "torch.func": around(PerSample),
    "tied over stages": tied,
    "frozen": around(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
    "convolution": around(
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()
        )
    ),
    "recurrent": around(
        lambda: nn.Sequential(nn.LSTM(WIDTH, WIDTH), Functional(lambda out: out[0]))
    ),
}


@every_mode
@every_dispatch
@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_results_have_the_bits_that_they_have_without_sharing(make, dispatch, mode):
    results = []
    for cache in (True, False):
        torch.manual_seed(0)
        results.append(train(make(), cache, dispatch=dispatch, mode=mode))
    assert_same_bits(*([r for r in run if r is not None] for run in results))


@every_mode
@every_dispatch
def test_a_change_that_leaves_no_trace_is_seen_without_sharing_alone(dispatch, mode):
    results = []
    for change, cache in [(unseen, True), (unseen, False), (in_place, True)]:
        torch.manual_seed(0)
        layers = around(lambda change=change: Changes(change))()
        results.append(train(layers, cache, dispatch=dispatch, mode=mode))
    shared, own, seen = ([r for r in run if r is not None] for run in results)
    assert not torch.equal(shared[0], own[0])
    assert torch.equal(own[0], seen[0])


@every_dispatch
def test_a_recomputation_uses_the_weights_of_its_backward(dispatch):
    results = []
    for cache in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        pipe = build(layers, mode="always", dispatch=dispatch)
        with casting(cache):
            loss = run(pipe)
        found = []
        for _ in range(2):
            for p in layers.parameters():
                p.data.mul_(1.5)  # which leaves the version as it was
            layers.zero_grad()
            loss.backward(retain_graph=True)
            found += grads(layers)
        pipe.close()
        results.append(found)
    assert_same_bits(*results)
    first, second = results[0][:5], results[0][8:13]
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_dispatch
@pytest.mark.parametrize("watch", [torch.no_grad, torch.inference_mode])
def test_evaluation_shares_casts_and_leaves_none_to_training(watch, dispatch):
    results = []
    for cache in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        pipe = build(layers, dispatch=dispatch)
        with casting(cache):
            with watch():
                value = pipe(data()[0])
            loss = run(pipe)
        loss.backward()
        pipe.close()
        results.append([value.clone(), loss.detach(), *grads(layers)])
        assert all(grad is not None for grad in results[-1])
    assert_same_bits(*results)
