"""The plasticity that policies decide by: of a fixed batch, equal on all ranks."""

import pytest
import torch

import pipetransformer as pt
from pipetransformer.autofreeze.similarity import plasticity_of, similarities
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

ROWS = 32


class Told(pt.freeze.Schedule):
    """Freezes by a list, and keeps the plasticity that it was told."""

    needs = frozenset({"plasticity"})

    def __init__(self, counts):
        super().__init__(counts)
        self.told = []

    def observe(self, stats):
        self.told.append(stats.plasticity)
        super().observe(stats)


def outputs_of(engine, units):
    """What each unit gives for the first rows of the set, in this process."""
    model, found = model_of(engine), []
    value = run_of(engine).inputs.workload.sample(ROWS)
    modes = [layer.training for layer in model]
    model.eval()
    with torch.no_grad():
        for number, layer in enumerate(model, start=1):
            value = layer(value)
            if number in units:
                found.append(similarities(value))
    for layer, mode in zip(model, modes, strict=True):
        layer.train(mode)
    return found


def train(policy, epochs=4, **options):
    """Return the engine, and what is expected of each epoch."""
    units = toy_units(6)
    engine = make_engine(freeze=policy, dropout=0.5, config=config(**options))
    expected = []
    with engine:
        engine.prepare(ToySet(48), 12)
        before = outputs_of(engine, units)
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
            now = outputs_of(engine, units)
            pairs = zip(now, before, strict=True)
            expected.append([plasticity_of(*pair) for pair in pairs])
            before = now
    return engine, expected


@pytest.mark.parametrize("stages", [1, 2])
def test_a_policy_is_told_how_far_its_units_have_come(stages):
    policy = Told([0, 0, 2, 2])
    _, expected = train(
        policy,
        plan=pt.PlanConfig(num_stages=stages, num_microbatches=2),
        pipe=pt.PipeConfig(num_slots=stages),
    )
    assert len(policy.told) == 4
    for told, each in zip(policy.told, expected, strict=True):
        assert told == pytest.approx(each, rel=1e-4, abs=1e-12)
    assert min(policy.told[0]) > 0
    # Frozen units give what they gave.
    assert policy.told[3][:2] == (0.0, 0.0) < policy.told[3][2:]


def test_looking_changes_no_bit():
    looked, _ = train(Told([0, 0, 2, 2]))
    plain, _ = train(schedule(0, 0, 2, 2))
    for mine, other in zip(
        model_of(looked).parameters(), model_of(plain).parameters(), strict=True
    ):
        assert torch.equal(mine, other)


def test_points_within_a_pass_compare_since_the_point_before():
    policy = Told([0])
    train(policy, epochs=2, freeze_every=2)
    assert len(policy.told) == 4 and all(min(told) > 0 for told in policy.told)


def on_ranks(rank):
    policy = pt.freeze.Plasticity(window=2, tolerance=0.9, patience=1)
    engine = make_engine(
        freeze=policy,
        config=config(plan=pt.PlanConfig(num_stages=1, num_microbatches=2)),
    )
    with engine:
        for _ in engine.epochs(5):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
        log = [(entry["statistics"], entry["decision"]) for entry in policy.log]
        return log, run_of(engine).state.frozen_units


@pytest.mark.distributed
def test_replicas_freeze_alike_by_what_they_found_together():
    results = run_ranks(on_ranks, 3)
    (first, frozen), *others = results
    assert [len(statistics) for statistics, _ in first] == [0, 1, 1, 1, 1, 1]
    # The lead alone decides about the first plan.
    assert others == [(first[1:], frozen)] * 2
    assert frozen > 0 and first[-1][1] >= frozen


class Centres(torch.nn.Module):
    """Works in place on what it is given."""

    def forward(self, x):
        return x.sub_(0.5)


def test_the_samples_that_are_looked_at_stay_as_they_are():
    probes = []
    policy = pt.freeze.Plasticity(window=2, tolerance=1e-9, patience=9)
    model = torch.nn.Sequential(Centres(), *toy_model(2))
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=torch.nn.CrossEntropyLoss(),
        freeze=policy,
        config=config(),
    )
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
            probes.append(run_of(engine).probe_batch.clone())
    assert len(probes) == 4
    assert all(torch.equal(probe, probes[-1]) for probe in probes[1:])
