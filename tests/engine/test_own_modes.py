"""Frozen layers stay in eval mode whatever the script calls; others are its own."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config
from tests.support.private import model_of, run_of
from tests.support.toy import ToySet

SIZE, BATCH, BOUNDARY = 24, 8, 3


class Evaluating:
    """Evaluates by itself in the middle of each pass, as a plain script does."""

    def __init__(self, also=lambda model: None):
        self.also = also

    def __call__(self, model, index):
        if index == 1:
            model.eval()
            with torch.no_grad():
                model(ToySet(6, seed=2).x)
            model.train()
            self.also(model)


def train(at_batch=lambda model, index: None, *, slots=1, prefix="auto", **cache):
    """Train with a batch norm and a dropout that freeze in the second pass."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 8),
            nn.Dropout(0.5),
            nn.Linear(8, 3),
        )
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([0, BOUNDARY]),
        config=config(
            cache=pt.CacheConfig(**cache),
            pipe=pt.PipeConfig(num_slots=slots),
            plan=pt.PlanConfig(
                num_stages=slots, num_microbatches=slots, max_replicas=1, prefix=prefix
            ),
        ),
    )
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(ToySet(SIZE), BATCH):
                engine.step(batch)
                at_batch(model, batch.index)
    epochs = engine.history.epochs
    moments = {k: v for k, v in model.state_dict().items() if "running" in k}
    return [e.train_loss for e in epochs], [e.cache_hits for e in epochs], moments


PLANS = {
    "cached": {},
    "recomputed": dict(enabled=False),
    "two stages": dict(slots=2, enabled=False),
    "filled": dict(slots=2, prefix="filled", enabled=False),
}


@pytest.mark.parametrize("name", PLANS)
def test_own_evaluation_within_a_pass_changes_nothing(name):
    losses, hits, moments = train(**PLANS[name])
    found = train(Evaluating(), **PLANS[name])
    assert found[0] == losses and found[1] == hits
    assert all(torch.equal(found[2][key], value) for key, value in moments.items())


def test_modes_of_active_layers_are_the_scripts():
    seen = set()

    def note(model, index):
        seen.add((model[1].training, model[4].training))

    def hold(model):
        model[4].eval()

    evaluating = Evaluating(hold)

    def at_batch(model, index):
        note(model, index)
        evaluating(model, index)

    train(at_batch, enabled=False)
    # Before and after the script switched dropout off, active and then frozen.
    assert {(True, True), (True, False), (False, True), (False, False)} >= seen
    assert (False, False) in seen


def test_layers_are_put_back_where_they_run_again():
    engine = pt.PipeTransformer(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2]),
        config=config(),
    )
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(SIZE), BATCH):
                model_of(engine).train()
                engine.step(batch)
                assert [layer.training for layer in model_of(engine)] == [0, 0, 1]
                run_of(engine).freezer.assert_consistent()
