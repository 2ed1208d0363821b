"""Layers in front that hold nothing to train are frozen from the start."""

import re

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config
from tests.support.private import policy_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units


def part_frozen(**options):
    """Return a model of which the first unit and a half do not train."""
    model = toy_model(**options)
    model[:3].requires_grad_(False)
    model[3].up.requires_grad_(False)
    return model


def engine_of(model, freeze, **plan):
    return pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        freeze=freeze,
        units=toy_units(),
        config=config(plan=pt.PlanConfig(**plan)),
    )


def train(engine, epochs):
    """Return the boundary of each epoch, and what explained the last plan."""
    boundaries = []
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(vouch=True), 24):
                engine.step(batch)
            boundaries.append(engine.plan.boundary if engine.plan else None)
        said = str(engine.explain()) if engine.is_main else ""
    return boundaries, said, engine.history


POLICIES = {
    "never": (pt.freeze.Never, [3, 3, 3]),
    "cap": (
        lambda: pt.freeze.AlphaCap(1 / 2, gradient_term=False),
        [3, 5, 6],
    ),  # 2 + 4 * 1/2, + 2 * 1/2
    "gradient": (lambda: pt.freeze.AlphaCap(1 / 2, gradient_term=True), None),
    "schedule": (lambda: pt.freeze.Schedule([0, 1, 4]), [3, 3, 5]),
    "manual": (pt.freeze.Manual, [3, 3, 3]),
    "dry": (
        lambda: pt.freeze.AlphaCap(1 / 2, dry_run=True, gradient_term=False),
        [3, 3, 3],
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_goes_below_the_starting_boundary(name):
    make, expected = POLICIES[name]
    model = part_frozen()
    flags = [p.requires_grad for p in model.parameters()]
    boundaries, said, history = train(engine_of(model, make()), 3)
    assert boundaries == expected if expected else min(boundaries) == 3
    assert "nothing trains before layer 3" in history.first_plan.reason
    assert "nothing does before layer 3" in said
    assert [p.requires_grad for p in model.parameters()] == flags


def test_layers_before_it_are_evaluated_and_their_outputs_cached():
    model = part_frozen(dropout=0.5)
    engine, modes = engine_of(model, pt.freeze.Never()), {1: set(), 4: set()}

    def note(layer, _):
        if engine.plan is not None:  # the profile is taken before
            modes[list(model).index(layer)].add(layer.training)

    for index in modes:
        model[index].register_forward_pre_hook(note)
    _, _, history = train(engine, 2)
    assert modes == {1: {False}, 4: {True}}
    assert [e.cache_hits for e in history.epochs] == [0, len(ToySet())]


def test_forced_cuts_begin_at_layer_0_as_before():
    engine = engine_of(part_frozen(), pt.freeze.Never(), cuts=(0, 8))
    assert train(engine, 1)[0] == [0]


def grow(rank):
    """One pipeline of two processes becomes two replicas; return bytes and weights."""
    model = part_frozen(width=64)
    if rank == 1:
        with torch.no_grad():
            model[-1][1].weight.add_(1.0)  # rank 0's is everybody's
    freeze = pt.freeze.Schedule([0, 6])
    engine = engine_of(model, freeze, num_stages=2)
    _, _, history = train(engine, 2)
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += 4 * parameter.numel()
    moved = [change.moved_bytes for change in history.transformations]
    return moved, sizes, model.state_dict()


@pytest.mark.distributed
def test_new_replicas_are_given_what_trains_alone():
    (moved, sizes, weights), (_, _, theirs) = run_ranks(grow, 2)
    # Weights and momentum, and the optimizer's settings as text.
    assert 0 < moved[0] - 2 * sizes[True] < 10_000 < sizes[False]
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)


def test_a_policy_sees_no_unit_without_parameters_as_the_most_settled():
    torch.manual_seed(0)
    sizes = [(4, 16), None, (16, 16), None, (16, 3)]
    model = nn.Sequential(*(nn.Linear(*s) if s else nn.ReLU() for s in sizes))
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.AlphaCap(1 / 4),
        config=config(),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
        log = policy_of(engine).log
    seen = [entry["statistics"]["gradient_norms"] for entry in log[1:]]
    frozen = [entry["state"]["num_frozen"] for entry in log[1:]]
    assert 1 in frozen, "no boundary right before a unit without parameters"
    for norms, units in zip(seen, frozen, strict=True):
        assert norms[:units] == [0.0] * units and min(norms[units:]) > 0
        assert norms[3] == norms[2]
        if units < 2:
            assert norms[1] == norms[0 if units == 0 else 2]


class Noise(nn.Module):
    """Changes its input in training alone."""

    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


def test_noise_in_front_of_a_frozen_backbone_is_named_once(caplog):
    text = r"layer 0 \(Noise\): nothing trains before layer 3, so that it is evaluated"
    for units, warns in (([3, 5], 1), ([5], 0)):  # with [5] the noise stays on
        model = nn.Sequential(Noise(), *toy_model(4))
        model[1:3].requires_grad_(False)
        engine = pt.PipeTransformer(
            model,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Never(),
            units=units,
            config=config(),
        )
        caplog.clear()
        boundaries, _, _ = train(engine, 2)
        assert boundaries == [3 * warns] * 2
        assert len(re.findall(text, caplog.text)) == warns
