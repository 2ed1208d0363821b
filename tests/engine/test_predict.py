"""Outputs of a set: each sample once, in order, on the ranks that asked for them."""

import os

import numpy
import pytest
import torch
from torch.utils.data import default_collate

import pipetransformer as pt
from tests.engine.losses import SURVIVING, DyingSet, die
from tests.engine.scenario import config, is_active, make_engine, schedule
from tests.support.private import function_at, inject, model_of, run_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.store_host import StoreHost
from tests.support.toy import ToySet

SIZE = 21  # three micro-batches of 7 rows


class Numbered(ToySet):
    """The samples' own numbers as a first feature, without targets."""

    def __getitem__(self, index):
        features = self.x[index].clone()
        features[0] = index
        return {"input": features}


def plain_outputs(engine, samples):
    model = model_of(engine).eval()
    with torch.no_grad():
        return model(torch.stack([samples[i]["input"] for i in range(len(samples))]))


def collect(rank, to, num_stages, postprocess=None):
    """Predict before, within and after a pass; return what this rank got."""
    engine = make_engine(
        freeze=schedule(0, 3), config=config(plan=pt.PlanConfig(num_stages=num_stages))
    )
    samples, found, expected = Numbered(SIZE), [], []

    def predict():
        return engine.predict(samples, to=to, postprocess=postprocess, name="numbers")

    with engine:
        engine.prepare(ToySet(24), 8)
        for _ in engine.epochs(2):
            found.append(predict())
            for batch in engine.batches(ToySet(24), 8):
                engine.step(batch)
                if batch.index == 1:
                    predict()
            found += [predict(), predict()]  # the second one reads the cache
            # Of four replicas the first one has none of the three micro-batches.
            if engine.plan and engine.plan.boundary and engine.plan.num_replicas < 4:
                cache = run_of(engine).caches.of("numbers", SIZE)
                assert cache.counters.hits > 0
        if is_active(engine):
            expected.append(plain_outputs(engine, samples))
        place = "lead" if engine.is_main else "active" if expected else "standby"
    return place, found, expected


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "num_stages"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1)]
)
@pytest.mark.parametrize("to", ["lead", "all"])
def test_each_sample_comes_once_in_order_where_it_was_asked_for(ranks, num_stages, to):
    results = run_ranks(collect, ranks, to, num_stages)
    places = [place for place, _, _ in results]
    assert places.count("lead") == 1
    lead = results[places.index("lead")]
    for place, found, expected in results:
        if place == "lead" or (place == "active" and to == "all"):
            assert all(outputs.shape == (SIZE, 3) for outputs in found)
            torch.testing.assert_close(found[-1], expected[0])
            assert torch.equal(found[-1], found[-2])
            assert not torch.allclose(found[0], found[1])  # trained in between
            assert all(map(torch.equal, found, lead[1]))
        else:
            # Who stands by at last may have been active at first.
            assert place != "lead" and found[-1] is None


def ragged(outputs):
    """One entry per row, of different lengths."""
    return [row[: 1 + n % 3] for n, row in enumerate(outputs)]


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_lists_may_be_ragged(ranks):
    (_, found, expected), *_ = run_ranks(collect, ranks, "lead", 1, ragged)
    # Micro-batches of 7 rows begin anew.
    assert [len(row) for row in found[-1]] == [1 + n % 7 % 3 for n in range(SIZE)]
    for row, whole in zip(found[-1], expected[0], strict=True):
        torch.testing.assert_close(row, whole[: len(row)])


def structured(outputs):
    best = outputs.argmax(1)
    words = [{"class": int(n), "why": ("most", None)} for n in best]
    return {"best": best, "both": (outputs.max(1).values, words, None), "no": None}


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_structures_are_joined_part_by_part(ranks):
    (_, found, expected), *_ = run_ranks(collect, ranks, "all", 1, structured)
    best = expected[0].argmax(1)
    assert torch.equal(found[-1]["best"], best)
    largest, words, nothing = found[-1]["both"]
    assert nothing is None and found[-1]["no"] is None
    torch.testing.assert_close(largest, expected[0].max(1).values)
    assert words == [{"class": int(n), "why": ("most", None)} for n in best]


def predict_ids(rank):
    """Return the first feature of each row: the sample's number."""
    engine = make_engine(freeze=schedule(0))
    with engine:
        engine.prepare(ToySet(24), 8)
        numbers = []

        def collate(samples):
            batch = default_collate(samples)
            numbers.append(batch["input"][:, 0])
            return batch

        return engine.predict(
            Numbered(SIZE), collate_fn=collate, postprocess=lambda _: numbers.pop(0)
        )


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_no_sample_is_missing_or_twice(ranks):
    found, *others = run_ranks(predict_ids, ranks)
    assert found.tolist() == list(range(SIZE))
    assert others == [None] * (ranks - 1)


def lengths(outputs):
    """Outputs of a length that differs between micro-batches."""
    lengths.calls += 1
    return outputs[:, : 1 + lengths.calls % 2]


def refuse(rank):
    lengths.calls = rank
    engine = make_engine(freeze=schedule(0))
    with engine:
        engine.prepare(ToySet(24), 8)
        with pytest.raises(ValueError, match="differ in rows alone.* let postprocess"):
            engine.predict(Numbered(SIZE), postprocess=lengths)
        return engine.predict(Numbered(SIZE), to="all").shape


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 3])
def test_outputs_that_do_not_fit_are_an_error_on_every_rank(ranks):
    assert run_ranks(refuse, ranks) == [(SIZE, 3)] * ranks


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"to": "rank 0"}, ValueError, "to: expected 'lead' or 'all', got 'rank 0'"),
        ({"name": "train"}, ValueError, "name: expected another one than the training"),
        ({"postprocess": lambda o: o[:-1]}, ValueError, "expected 7 rows .* got 6"),
        ({"postprocess": lambda o: o.sum()}, ValueError, "expected 7 rows .* got 0"),
        ({"postprocess": lambda o: [1]}, ValueError, "expected 7 rows .* got 1"),
        ({"postprocess": lambda o: "abc"}, TypeError, "expected tensors, .* got str"),
        ({"postprocess": lambda o: None}, TypeError, "expected tensors, .* NoneType"),
        (
            {"postprocess": lambda o: [numpy.float64(x) for x in o[:, 0]]},
            TypeError,
            "expected entries of tensors and plain values, got float64",
        ),
    ],
)
def test_what_cannot_be_is_named(arguments, error, text):
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.prepare(ToySet(24), 8)
        with pytest.raises(error, match=text):
            engine.predict(Numbered(SIZE), **arguments)


# -- ranks are lost ---------------------------------------------------------------


class Dying(Numbered, DyingSet):
    def __getitem__(self, index):
        if self.doomed:
            die()
        return super().__getitem__(index)


def die_with_the_result():
    """Kill this process once it holds a result, and before the others know."""
    advance = function_at("predict")

    def doomed(*arguments):
        advance(*arguments)
        die()

    inject("predict", doomed)


def lose(rank, where, victim, to, environment):
    """Predict after each of three epochs; a rank dies in the second prediction."""
    os.environ.update(environment)
    engine = make_engine(
        freeze=schedule(0),
        config=config(
            plan=pt.PlanConfig(num_stages=1, reshape="never", max_replicas=3),
            autodp=SURVIVING,
        ),
    )
    samples, found = Dying(SIZE), []
    with engine:
        engine.prepare(ToySet(24), 8)
        for epoch in engine.epochs(3):
            for batch in engine.batches(ToySet(24), 8):
                engine.step(batch)
                if where == "within" and (epoch, batch.index) == (1, 1):
                    samples.doomed = rank == victim
                    found.append(engine.predict(samples, to=to, name="samples"))
            samples.doomed = (epoch, rank, where) == (1, victim, "after")
            if (epoch, rank, where) == (1, victim, "bring"):
                inject("bring", die)
            if (epoch, rank, where) == (1, victim, "held"):
                die_with_the_result()
            found.append(engine.predict(samples, to=to, name="samples"))
        leads, active = engine.is_main, is_active(engine)
    return leads, active, found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("where", "victim", "to"),
    [
        ("after", 1, "lead"),
        ("after", 0, "lead"),
        ("bring", 0, "lead"),
        ("bring", 2, "all"),
        ("held", 0, "lead"),
        ("held", 0, "all"),
        ("within", 1, "all"),
    ],
)
def test_a_lost_rank_costs_no_sample(where, victim, to):
    with (
        StoreHost() as host,
        Ranks(lose, 4, where, victim, to, host.environment) as ranks,
    ):
        survivors = [rank for rank in range(4) if rank != victim]
        outcomes = ranks.outcomes(survivors)
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
    results = [value for _, value in outcomes.values()]
    (lead,) = [found for leads, _, found in results if leads]
    assert lead[-1].shape == lead[-2].shape == (SIZE, 3)
    for leads, active, found in results:
        if leads or (active and to == "all"):
            assert torch.equal(found[-1], lead[-1])
            assert torch.equal(found[-2], lead[-2])
