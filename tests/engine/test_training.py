import dataclasses

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import planner
from tests.engine.even_profile import measured_profile
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy, toy_model


def plain_training(dtype, epochs, order):
    model = toy_model(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    train_set = ToySet(50, dtype=dtype)
    for epoch in range(epochs):
        for ids in order[epoch]:
            outputs = model(train_set.x[ids])
            nn.functional.cross_entropy(outputs, train_set.y[ids]).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def engine_training(rank, slots, stages, micro_batches, replicas):
    settings = config(
        plan=pt.PlanConfig(
            num_stages=stages, num_microbatches=micro_batches, max_replicas=replicas
        ),
        pipe=pt.PipeConfig(num_slots=slots),
    )
    engine = make_engine(freeze=pt.freeze.Never(), dtype=torch.float64, config=settings)
    order = []
    with engine:
        for _ in engine.epochs(2):
            batches = []
            for batch in engine.batches(ToySet(50, dtype=torch.float64), 12):
                engine.step(batch)
                batches.append(batch.ids.tolist())
            order.append(batches)
    weights = [p.detach().clone() for p in model_of(engine).parameters()]
    return order, weights


@pytest.mark.parametrize(("slots", "stages", "micro"), [(1, 1, 1), (3, 3, 4)])
def test_training_alone_equals_a_plain_loop(slots, stages, micro):
    order, weights = engine_training(0, slots, stages, micro, None)
    reference = plain_training(torch.float64, 2, order)
    for a, b in zip(weights, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_plan_of_measured_times_trains_what_a_plain_loop_trains(monkeypatch):
    # Which K and M it has depends on the machine, as everywhere but in these tests.
    monkeypatch.setattr(planner, "profile", measured_profile)
    order, weights = engine_training(0, 3, None, None, None)
    reference = plain_training(torch.float64, 2, order)
    for a, b in zip(weights, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.distributed
def test_replicas_with_unequal_shares_equal_a_plain_loop():
    # 50 samples in batches of 12 over 3 replicas: the last batch has 2 rows, so one
    # replica has none.
    results = run_ranks(engine_training, 3, 1, 1, 1, 3)
    orders = [result[0] for result in results]
    joined = [
        [
            sum(parts, [])
            for parts in zip(*(order[epoch] for order in orders), strict=True)
        ]
        for epoch in range(2)
    ]
    assert sorted(sum(joined[0], [])) == list(range(50))
    reference = plain_training(torch.float64, 2, joined)
    for a, b in zip(results[0][1], reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_users_own_loop_trains_like_step():
    def own(engine, batch):
        loss = nn.functional.cross_entropy(engine.model(batch), batch.targets)
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def run(step):
        # M fixed: it is planned from measured times, and other M add up otherwise.
        one = config(plan=pt.PlanConfig(num_microbatches=1))
        engine = make_engine(freeze=pt.freeze.Never(), config=one)
        engine._arguments = _without_scheduler(engine._arguments)
        with engine:
            for batch in engine.batches(ToySet(24), 12):
                step(engine, batch)
        return [p.detach().clone() for p in model_of(engine).parameters()]

    for a, b in zip(run(own), run(lambda e, b: e.step(b)), strict=True):
        assert torch.equal(a, b)


def _without_scheduler(arguments):
    return dataclasses.replace(arguments, lr_scheduler=None)


def test_bare_inputs_train_without_ids():
    engine = make_engine(freeze=schedule(2))
    data = ToySet(8)
    with engine:
        engine.prepare(data, 8)
        first = engine.step(data.x, data.y)
        for _ in range(20):
            last = engine.step(data.x, data.y)
    assert last < first


def test_stale_model_handle_raises_after_a_transformation():
    engine = make_engine(freeze=schedule(0, 2))
    handle = None
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(12), 12):
                handle = handle or engine.model
                engine.step(batch)
        with pytest.raises(RuntimeError, match="a handle from before a transformation"):
            handle(torch.zeros(2, 4))


def test_frozen_layers_do_not_move_and_keep_their_moments():
    engine = make_engine(freeze=schedule(0, 3))
    seen = []
    with engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
            model, optimizer = model_of(engine), engine.optimizer
            frozen = [p for layer in model[:4] for p in layer.parameters()]
            now = [p.detach().clone() for p in frozen]
            states = [optimizer.state[p]["exp_avg"].clone() for p in frozen]
            seen.append(now + states)
            if epoch == 1:
                assert all(map(torch.equal, *seen))
                assert not any(p.requires_grad for p in frozen)
                assert not any(layer.training for layer in model[:4])
    assert all(p.requires_grad for p in model_of(engine).parameters())
    assert all(layer.training for layer in model_of(engine))


def test_cached_inputs_are_not_loaded_again():
    data = ToySet(24, vouch=True)
    engine = make_engine(freeze=schedule(2))
    with engine:
        for epoch in engine.epochs(3):
            before = data.loads
            for batch in engine.batches(data, 12):
                engine.step(batch)
            if epoch > 0:
                assert data.loads == before, "every sample was a hit"


def test_random_augmentation_never_hits_and_ends_the_caches_use():
    class Noisy(ToySet):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.rand(4), y

    engine = make_engine(freeze=schedule(2))
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(Noisy(24), 12):
                engine.step(batch)
    assert [e.cache_hits for e in engine.history.epochs] == [0, 0, 0, 0]
    # Nothing is asked for from the fourth epoch on: see ActivationCache.begin_pass.
    assert [e.cache_misses for e in engine.history.epochs] == [24, 24, 24, 0]


def test_cache_on_and_off_give_equal_losses():
    def run(enabled):
        engine = make_engine(
            freeze=schedule(0, 2, 2, 4),
            dtype=torch.float64,
            config=config(cache=pt.CacheConfig(enabled=enabled)),
        )
        with engine:
            for _ in engine.epochs(4):
                for batch in engine.batches(ToySet(24, dtype=torch.float64), 12):
                    engine.step(batch)
                engine.evaluate(ToySet(9, dtype=torch.float64), {"accuracy": accuracy})
        return [(e.train_loss, e.metrics["loss"]) for e in engine.history.epochs]

    for a, b in zip(run(True), run(False), strict=True):
        assert a == pytest.approx(b, rel=1e-12)


def test_same_seed_gives_the_same_bits():
    def run():
        engine = make_engine(
            freeze=schedule(0, 2),
            dropout=0.2,
            config=config(
                plan=pt.PlanConfig(num_stages=2, num_microbatches=3),
                pipe=pt.PipeConfig(num_slots=2),
            ),
        )
        with engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(24), 12):
                    engine.step(batch)
        return [p.detach().clone() for p in model_of(engine).parameters()]

    assert all(map(torch.equal, run(), run()))


def test_alpha_cap_with_gradient_term_freezes_within_the_cap():
    engine = make_engine(freeze=pt.freeze.AlphaCap(1 / 3, gradient_term=True))
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
    frozen = [e.shape.num_frozen_layers for e in engine.history.epochs]
    assert frozen[0] == 0 and frozen == sorted(frozen)
    assert all(n <= cap for n, cap in zip(frozen, (0, 2, 4, 5), strict=True))
    assert frozen[-1] > 0


class NamedInputs(ToySet):
    """Inputs as keywords of the first layer."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return {"left": x[:2], "right": x[2:]}, y


class Join(nn.Module):
    def forward(self, left, right):
        return torch.cat([left, right], 1)


def test_dict_inputs_are_keywords_of_the_first_layer():
    def run(model, data):
        engine = pt.PipeTransformer(
            model,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss=nn.CrossEntropyLoss(),
            freeze=schedule(0, 2),
            config=config(
                plan=pt.PlanConfig(num_stages=2, num_microbatches=2),
                pipe=pt.PipeConfig(num_slots=2),
            ),
        )
        with engine:
            for _ in engine.epochs(3):
                for batch in engine.batches(data, 12):
                    engine.step(batch)
                metrics = engine.evaluate(data, {"accuracy": accuracy})
        return metrics["loss"]

    named = run(nn.Sequential(Join(), *toy_model()), NamedInputs(24))
    plain = run(nn.Sequential(nn.Identity(), *toy_model()), ToySet(24))
    assert named == pytest.approx(plain, rel=1e-6)
