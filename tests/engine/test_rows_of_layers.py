"""Rows are dim 0 where layers may freeze and where outputs are joined."""

import re

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import planner
from tests.engine.scenario import config
from tests.support.ranks import run_ranks

WORDS, LENGTH, WIDTH, CLASSES = 12, 5, 6, 3


class Swap(nn.Module):
    """Gives ``(rows, length, ...)`` as ``(length, rows, ...)``, and back."""

    def forward(self, x):
        return x.transpose(0, 1)


class Flat(nn.Module):
    """Gives ``(rows * length, ...)``."""

    def forward(self, x):
        return x.flatten(0, 1)


class Pooled(nn.Module):
    """Gives one row per sample again."""

    def forward(self, x):
        return x.view(-1, LENGTH, x.shape[-1]).mean(1)


class Mean(nn.Module):
    """Gives one row per sample of what was not flat."""

    def forward(self, x):
        return x.mean(1)


class PooledBoth(Pooled):
    """Pools the sum of two."""

    def forward(self, x, other):
        return super().forward(x + other)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH)  # time first

    def forward(self, x):
        return self.inner(x)[0]


class Last(nn.Module):
    def forward(self, x):
        return x[-1]


class Aside(nn.Module):
    """Gives its input and something else."""

    def __init__(self, aside):
        super().__init__()
        self.aside = aside

    def forward(self, x):
        return x, self.aside(x)


class Texts(torch.utils.data.Dataset):
    """Sentences with a class for each, or for each of their words."""

    def __init__(self, size=22, *, words=False):
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randint(WORDS, (size, LENGTH), generator=generator)
        self.y = self.x % CLASSES if words else self.x.sum(1) % CLASSES

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def of_tokens(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def of_times(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.T.flatten())


def of_first(outputs, targets):
    return nn.functional.cross_entropy(outputs[0], targets)


def train(
    *layers,
    loss=None,
    words=False,
    freeze=(0, 2),
    pipe=(),
    units=None,
    told=None,
    **plan,
):
    """Train on 22 samples in batches of 8; return the losses of the passes.

    The plan at the end and its explanation are appended to what is `told`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *[make() for make in layers]
    ).double()
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        loss=loss or nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(list(freeze)) if freeze else pt.freeze.Never(),
        units=units,
        config=config(
            plan=pt.PlanConfig(**plan),
            pipe=pt.PipeConfig(num_slots=plan.get("num_stages", 1), **dict(pipe)),
        ),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(Texts(words=words), 8):
                engine.step(batch)
        if told is not None:
            told.append((engine.plan, str(engine.explain())))
    return [epoch.train_loss for epoch in engine.history.epochs]


def head():
    return nn.Linear(WIDTH, CLASSES)


TIME_FIRST = (Swap, Recurrent, Recurrent, Last, head)
FLAT = (Flat, lambda: nn.Linear(WIDTH, WIDTH), Pooled, head)
TWO = dict(num_stages=2, num_microbatches=2)


@pytest.mark.parametrize("plan", [{}, TWO, dict(num_microbatches=1)], ids=str)
def test_time_first_is_refused_before_the_first_plan_where_layers_may_freeze(plan):
    text = (
        r"layer 1 \(Swap\): expected tensors with one row per sample in dim 0, .* got "
        r"a tensor of shape \(5, 1, 6\) for 1 sample and \(5, 2, 6\) for 2"
    )
    with pytest.raises(TypeError, match=text):
        train(*TIME_FIRST, **plan)


def test_tokens_that_a_later_layer_pools_are_refused_where_layers_may_freeze():
    text = r"layer 1 \(%s\): expected .* got 5 rows of each sample"
    with pytest.raises(TypeError, match=text % "Flat"):
        train(*FLAT, **TWO)
    with pytest.raises(TypeError, match=text % "Sequential"):  # in a tuple, too
        train(lambda: nn.Sequential(Flat(), Aside(torch.sin)), PooledBoth, head, **TWO)


@pytest.mark.parametrize("layers", [TIME_FIRST, FLAT])
def test_layers_between_which_nothing_freezes_hand_on_what_they_like(layers):
    alone = train(*layers, freeze=None, num_microbatches=1)
    assert train(*layers, freeze=None, **TWO) == pytest.approx(alone, rel=1e-9)
    # One unit from the embedding to where rows are rows again.
    ends = [layers.index(next(p for p in layers if p in (Last, Pooled))) + 2]
    frozen = [train(*layers, freeze=(0, 1), units=ends, **p) for p in ({}, TWO)]
    assert frozen[1] == pytest.approx(frozen[0], rel=1e-9)


def test_tokens_that_stay_tokens_may_freeze():
    layers = (Flat, lambda: nn.Linear(WIDTH, WIDTH), head)
    options = dict(loss=of_tokens, words=True)
    alone = train(*layers, num_microbatches=1, **options)
    assert train(*layers, **TWO, **options) == pytest.approx(alone, rel=1e-9)


def test_tokens_may_freeze_where_batches_stay_whole():
    expected = train(nn.Identity, FLAT[1], Mean, head)
    whole = dict(num_microbatches=1)
    assert train(*FLAT, **whole) == pytest.approx(expected, rel=1e-9)
    found = train(*FLAT, num_stages=2, **whole)
    assert found == pytest.approx(expected, rel=1e-9)


OUTPUTS = {
    "times": ((Swap, Recurrent, head), of_times, r"\(5, 1, 3\) for 1 .* \(5, 2, 3\)"),
    "one": (
        (Flat, Pooled, head, lambda: Aside(lambda x: x.square().mean().view(1))),
        of_first,
        r"\(1,\) for 1 sample and \(1,\) for 2",
    ),
    "table": (
        (Flat, Pooled, head, lambda: Aside(lambda x: torch.zeros(4, 2))),
        of_first,
        r"\(4, 2\) for 1 sample and \(4, 2\) for 2",
    ),
    "none": (
        (Flat, Pooled, head, lambda: Aside(lambda x: x.square().mean())),
        of_first,
        r"joined, got a tensor of shape \(\) for 1 sample and \(\) for 2",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_cannot_be_joined_are_refused_where_micro_batches_are_forced(name):
    layers, loss, text = OUTPUTS[name]
    text = rf"layer {len(layers)} \(\w+\): expected outputs with the batch's .* {text}"
    with pytest.raises(TypeError, match=text):
        train(*layers, loss=loss, words=name == "times", freeze=None, **TWO)


def test_outputs_without_a_dimension_are_refused_whatever_the_plan():
    layers, loss, text = OUTPUTS["none"]
    with pytest.raises(TypeError, match=text):
        train(*layers, loss=loss, freeze=None)


WHOLE = {name: OUTPUTS[name] for name in ("times", "one", "table")} | {
    "pooled": (FLAT, None, "layer 1 .Flat.: expected .* got 5 rows of each sample")
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("stages", [1, 2])
def test_the_planner_leaves_batches_whole_where_layers_ask_for_it(caplog, name, stages):
    """With the losses of M=1, a warning that says why, and alternatives alike."""
    layers, loss, text = WHOLE[name]
    options = dict(loss=loss, words=name == "times")
    options |= dict(freeze=(0, 2) if name == "pooled" else None, num_stages=stages)
    told = []
    found = train(*layers, told=told, **options)
    assert found == train(*layers, num_microbatches=1, **options)
    warned = "\n".join(r.getMessage() for r in caplog.records)
    assert re.search(f"batches are not cut into micro-batches: .*{text}", warned)
    ((plan, explained),) = told
    assert {each.num_microbatches for each in (plan, *plan.candidates)} == {1}
    assert re.search(f"batches are not cut into micro-batches: .*{text}", explained)


def on_ranks(_rank, name):
    layers, loss, _ = WHOLE[name]
    told = []
    losses = train(*layers, loss=loss, freeze=None, told=told, max_replicas=2)
    return losses, told[0][0].shape


@pytest.mark.distributed
def test_every_rank_leaves_batches_whole():
    found = run_ranks(on_ranks, 2, "one")
    assert found[0] == found[1] and found[0][1][2] == 1


def test_outputs_without_rows_are_right_where_nothing_is_joined():
    layers, loss, _ = OUTPUTS["times"]
    options = dict(loss=loss, words=True, freeze=None)
    whole = train(*layers, num_microbatches=1, **options)
    assert whole[-1] < whole[0]
    stages = train(*layers, num_stages=2, num_microbatches=1, **options)
    assert stages == pytest.approx(whole, rel=1e-9)
    # Each micro-batch has its loss.
    turns = train(*layers, pipe={"schedule": "1f1b"}, **TWO, **options)
    assert turns == pytest.approx(whole, rel=1e-9)


def test_several_rows_of_a_sample_are_joined():
    layers, options = (Flat, head), dict(loss=of_tokens, words=True, freeze=None)
    whole = train(*layers, num_microbatches=1, **options)
    assert train(*layers, **TWO, **options) == pytest.approx(whole, rel=1e-9)


def test_one_row_alone_shows_nothing():
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Swap(), Recurrent(), head())
    sample = torch.zeros(1, LENGTH, dtype=torch.int64)
    planner.check_layers(model, sample, boundaries=(1, 2, 3))
    with pytest.raises(TypeError, match=r"layer 1 \(Swap\): expected tensors with"):
        planner.check_layers(model, sample.expand(2, LENGTH), boundaries=(1, 2, 3))


def test_checking_layers_leaves_the_model_as_it_was_found():
    class Asks(nn.Module):
        """Asks for a gradient with regard to its input, as some layers do."""

        def forward(self, x):
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
            return slope

    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), Asks(), nn.Dropout(0.5), nn.Linear(4, 2)
    )
    model[1].eval()
    sample = torch.rand(6, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, drawn = [m.training for m in model.modules()], torch.random.get_rng_state()
    planner.check_layers(model, sample, boundaries=(1, 2))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
