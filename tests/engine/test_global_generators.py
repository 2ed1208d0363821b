"""The engine leaves the global random generators as the program has them.

Its own draws are keyed: by the seed, the step, the micro-batch and the layer.
"""

import contextlib
import random

import numpy
import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import planner
from pipetransformer.planner.measure import profile
from tests.engine.scenario import QUICK, config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import Block, ToySet, accuracy, toy_model, toy_units


@pytest.fixture(autouse=True)
def _real_profiles(_even_profiles, monkeypatch):
    monkeypatch.setattr(planner, "profile", profile)


def states():
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        numpy.random.get_state()[1].tobytes(),
    )


@contextlib.contextmanager
def untouched(what):
    before = states()
    yield
    assert states() == before, what


class Noise(nn.Module):
    """Draws in evaluation too."""

    def forward(self, x):
        return x + 0.01 * torch.randn_like(x)


def noisy_engine(depth, options):
    first, *others = toy_model(depth, dropout=0.5)
    model = nn.Sequential(first, Noise(), *others)
    return pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0, 2),
        units=[unit + 1 for unit in toy_units(depth)],
        config=options,
    )


def drive(rank, make, arguments, epochs=3, loaders=0):
    """Use the engine in every way, drawing between what it does."""
    torch.manual_seed(rank)
    train_set, test_set = ToySet(50), ToySet(21, seed=2)
    losses = []
    with contextlib.ExitStack() as stack:
        with untouched("construct"):
            engine = make(**arguments)
        with untouched("open"):
            stack.enter_context(engine)
        with untouched("prepare"):
            engine.prepare(train_set, 12)
        for epoch in engine.epochs(epochs):
            with untouched(f"evaluate at the begin of epoch {epoch}"):
                engine.evaluate(test_set, {"accuracy": accuracy}, name="begin")
            before = states()
            loaded = engine.batches(train_set, 12, num_workers=loaders)
            for step, batch in enumerate(loaded):
                assert states() == before, f"batch {step} of epoch {epoch}"
                with untouched(f"step {step} of epoch {epoch}"):
                    losses.append(float(engine.step(batch)))
                torch.randn(3)  # the program's own
                before = states()
            with untouched(f"evaluate at the end of epoch {epoch}"):
                engine.evaluate(test_set, {"accuracy": accuracy}, name="end")
        before = states()
    assert states() == before, "close"
    return losses


def settings(**plan):
    return config(
        plan=pt.PlanConfig(num_microbatches=2, **plan),
        pipe=pt.PipeConfig(num_slots=2),
        autodp=QUICK,
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_engine_with_dropout_leaves_the_global_generators(stages):
    arguments = {
        "freeze": schedule(0, 2),
        "dropout": 0.5,
        "config": settings(num_stages=stages),
    }
    drive(0, make_engine, arguments, loaders=1)


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_that_draw_in_evaluation_leave_the_global_generators(stages):
    arguments = {"depth": 6, "options": settings(num_stages=stages)}
    losses = drive(0, noisy_engine, arguments)
    assert losses == drive(5, noisy_engine, arguments)


@pytest.mark.distributed
def test_ranks_of_a_transformation_keep_their_generators():
    arguments = {
        "freeze": schedule(0, 2),
        "dropout": 0.5,
        "config": settings(num_stages=1),
    }
    run_ranks(drive, 2, make_engine, arguments)


def test_profile_of_layers_that_draw_leaves_the_global_generators():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), Noise(), Block(8, 0.5))
    with untouched("profile"):
        planner.profile(model, torch.ones(4, 4))
