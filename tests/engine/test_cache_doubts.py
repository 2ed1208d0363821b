"""A cache that must not be used is left, and training goes on as without it."""

import contextlib
import logging
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autocache import (
    ActivationCache,
    fingerprint_chain,
    values_context,
)
from tests.autocache.test_cache import flip_bit
from tests.engine.scenario import config
from tests.support.private import model_of, run_of
from tests.support.toy import ToySet, accuracy, toy_model

SIZE = 24


class Mixing(nn.Module):
    """Each row depends on the others of its batch: nothing to be cached."""

    def forward(self, x):
        return x - x.mean(0)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def train(layer, dataset, *, epochs=4, slots=1, at_batch=None, frozen=None, **cache):
    """Train with a frozen first part; return losses, history and what was computed."""
    toy = toy_model(3)
    model = nn.Sequential(toy[0], layer, *list(toy)[1:])
    rows = []
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(frozen or [2] * epochs),
        config=config(
            cache=pt.CacheConfig(**cache),
            pipe=pt.PipeConfig(num_slots=slots),
            plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
        ),
    )
    losses = []
    with engine:
        first = model_of(engine)[0]
        first.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(dataset, 12):
                if at_batch is not None:
                    at_batch(engine, epoch, batch.index)
                losses.append(float(engine.step(batch)))
        given_up = run_of(engine).caches.training()
        given_up = given_up and given_up.given_up
    return losses, engine.history, rows, given_up


class Left(nn.Module):
    """Leaves out what comes late in a batch, as limits of a capacity do."""

    def forward(self, x):
        return torch.where(torch.arange(len(x))[:, None] < 5, x, 0 * x)


class Shifting(nn.Module):
    """Its code changes from pass to pass, which no fingerprint sees."""

    def forward(self, x):
        return x + SHIFT["by"]


SHIFT = {"by": 0.0}


@pytest.fixture
def shift():
    yield lambda engine, epoch, number: SHIFT.update(by=float(epoch))
    SHIFT["by"] = 0.0


@pytest.mark.parametrize(
    ("layer", "slots"),
    [(Mixing, 1), (Mixing, 2), (Left, 1), (Left, 2), (Noise, 1)],
)
def test_layers_that_mix_or_draw_are_found_before_anything_is_stored(
    layer, slots, caplog
):
    with caplog.at_level(logging.WARNING):
        found = train(layer(), ToySet(SIZE), slots=slots)
    plain = train(layer(), ToySet(SIZE), slots=slots, enabled=False)
    assert found[0] == plain[0]
    assert [each.get("stored", 0) for each in found[1].cache] == [0] * 4
    assert caplog.text.count("a sample computed without its batch differs") == 1


class Slow(Mixing):
    """Takes its time for a row alone, while another worker stores."""

    def forward(self, x):
        if len(x) == 1:
            time.sleep(0.2)
        return super().forward(x)


def test_no_worker_stores_before_a_row_has_been_compared(caplog):
    toy = toy_model(3)
    engine = pt.PipeTransformer(
        nn.Sequential(toy[0], Slow(), *list(toy)[1:]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2]),
        config=config(
            pipe=pt.PipeConfig(num_slots=2),
            plan=pt.PlanConfig(num_stages=2, num_microbatches=2),
        ),
    )
    with engine, caplog.at_level(logging.WARNING):
        engine.prepare(ToySet(SIZE), 12)
        engine.evaluate(ToySet(SIZE), name="dev")
        cache = run_of(engine).caches.of("dev", SIZE)
        assert cache is None or cache.counters.stored == 0
    assert caplog.text.count("a sample computed without its batch differs") == 1


class Alone(nn.Module):
    """Cannot run a row alone, which the profile does not see."""

    ready = False

    def forward(self, x):
        if self.ready and not self.training and len(x) == 1:
            raise ArithmeticError("one row is none")
        return torch.tanh(x)


def test_a_layer_that_cannot_run_a_row_alone_is_not_cached(monkeypatch, caplog):
    monkeypatch.setattr(Alone, "ready", False)

    def ready(*_):
        monkeypatch.setattr(Alone, "ready", True)

    with caplog.at_level(logging.WARNING):
        found = train(Alone(), ToySet(SIZE), frozen=[0, 2, 2, 2], at_batch=ready)
    assert "(ArithmeticError: one row is none)" in caplog.text
    assert [each["hits"] for each in found[1].cache] == [0] * 4


def test_without_an_audit_they_would_differ():
    found = train(Mixing(), ToySet(SIZE), audit_every=0)
    plain = train(Mixing(), ToySet(SIZE), enabled=False)
    assert found[0] != plain[0] and found[3] is None


def test_one_row_runs_alone_for_each_boundary():
    found = train(nn.Tanh(), ToySet(SIZE), frozen=[1, 1, 2, 2])
    without = train(nn.Tanh(), ToySet(SIZE), frozen=[1, 1, 2, 2], audit_every=0)
    assert sorted(found[2]) == sorted([*without[2], 1, 1])
    assert found[0] == without[0]


@pytest.mark.parametrize("slots", [1, 2])
def test_layers_that_change_unseen_fail_the_audit_and_are_recomputed(
    slots, shift, caplog
):
    options = {"slots": slots, "at_batch": shift}
    with caplog.at_level(logging.WARNING):
        found = train(Shifting(), ToySet(SIZE), audit_every=1, **options)
    plain = train(Shifting(), ToySet(SIZE), enabled=False, **options)
    assert found[0] == plain[0]
    assert "a sample computed again at boundary 2 differs" in caplog.text
    assert caplog.text.count("used no more") == 1
    assert found[3] and found[1].cache[-1]["audited"] == 0
    # Its records are gone for other processes, too.
    assert sum(each["audited"] for each in found[1].cache) == 1


@pytest.mark.parametrize("every", [1, 7, 1000])
def test_right_records_pass_every_audit(every):
    found = train(nn.Tanh(), ToySet(SIZE), audit_every=every, verify="all")
    assert found[3] is None
    hits = [each["hits"] for each in found[1].cache]
    assert hits == [0, SIZE, SIZE, SIZE]
    audited = sum(each["audited"] for each in found[1].cache)
    # At most one of each batch: two batches of twelve rows a pass.
    assert audited == {1: 6, 7: 6, 1000: 0}[every]
    assert found[0] == train(nn.Tanh(), ToySet(SIZE), audit_every=0)[0]


def test_one_hit_in_a_thousand_is_audited_unless_told_otherwise():
    found = train(nn.Tanh(), ToySet(600), epochs=3)
    assert [each["hits"] for each in found[1].cache] == [0, 600, 600]
    assert [each["audited"] for each in found[1].cache] == [0, 0, 1]


def test_a_failed_audit_empties_the_cache_and_training_goes_on(shift):
    left = []

    def look(engine, epoch, number):
        shift(engine, epoch, number)
        if number == 0 and (cache := run_of(engine).caches.training()) is not None:
            with attached(engine, cache) as other:
                other.fetch(torch.arange(SIZE), chain=[0])
                left.append(other.counters.stale)

    found = train(Shifting(), ToySet(SIZE), epochs=4, at_batch=look, audit_every=1)
    # Those of the first epoch; the first batch of the second finds one of them wrong.
    assert [count for count in left if count] == [SIZE] and left[-2:] == [0, 0]
    assert [epoch.samples for epoch in found[1].epochs] == [SIZE] * 4


@contextlib.contextmanager
def attached(engine, cache):
    run_id = run_of(engine).info.run_id
    other = ActivationCache.attach(cache.address, run_id=run_id)
    try:
        yield other
    finally:
        other.close()


@pytest.mark.parametrize("cache", [{"verify": "all"}, {"debug": True}])
def test_every_damaged_record_is_found_where_all_checksums_are_compared(cache):
    def damage(engine, epoch, number):
        """Flip a bit of each sample's record."""
        if (epoch, number) == (1, 0):
            layers, training = list(model_of(engine)), run_of(engine).caches.training()
            chain = fingerprint_chain(layers, 2, context=values_context())
            with attached(engine, training) as other:
                (found,) = other.fetch(torch.arange(SIZE), chain=chain)
            assert len(found.rows) == SIZE
            for row in found.tensors[0]:
                flip_bit(training, row.numpy().tobytes())

    found = train(nn.Tanh(), ToySet(SIZE), epochs=3, at_batch=damage, **cache)
    counts = [(each["hits"], each["corrupt"]) for each in found[1].cache]
    assert counts == [(0, 0), (0, SIZE), (SIZE, 0)]
    assert found[0] == train(nn.Tanh(), ToySet(SIZE), epochs=3, enabled=False)[0]


class Augmented(ToySet):
    """Inputs that differ whenever they are loaded."""

    def __init__(self, size, share=1.0):
        super().__init__(size)
        self.changing = round(share * size)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x + torch.randn(4), y) if i < self.changing else (x, y)


def test_random_augmentation_ends_the_writing_after_two_passes(caplog):
    with caplog.at_level(logging.WARNING):
        found = train(nn.Tanh(), Augmented(SIZE), epochs=5)
    cache = found[1].cache
    assert [each.get("stored", 0) for each in cache] == [SIZE, SIZE, SIZE, 0, 0]
    assert [each.get("changed", 0) for each in cache] == [0, SIZE, SIZE, 0, 0]
    assert [each["hits"] for each in cache] == [0] * 5
    assert caplog.text.count("24 of 24 samples have other inputs than in the pass") == 1
    assert "24 of other inputs" in "\n".join(_lines(found[1]))


def test_another_training_set_half_way_is_cached_after_a_pass():
    def change(engine, epoch, number):
        dataset.seed = (epoch + number) // 3  # the last batch of an epoch is loaded

    class Curriculum(ToySet):
        seed = 0

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + self.seed, y

    dataset = Curriculum(SIZE)
    found = train(nn.Tanh(), dataset, epochs=6, at_batch=change)
    hits = [each["hits"] for each in found[1].cache]
    assert hits == [0, SIZE, SIZE, 0, SIZE, SIZE]
    assert found[3] is None


def _lines(history):
    from pipetransformer.report.console import epoch_line

    return [epoch_line(record) for record in history.epochs]


def test_augmentation_of_some_leaves_the_cache_to_the_others():
    found = train(nn.Tanh(), Augmented(SIZE, share=0.5))
    assert [each["hits"] for each in found[1].cache] == [0, *[SIZE // 2] * 3]
    assert found[3] is None


def test_samples_that_a_thaw_has_made_stale_do_not_end_the_cache():
    half = Augmented(SIZE, share=0.5)
    found = train(nn.Tanh(), half, epochs=5, frozen=[3, 3, 2, 2, 2])
    assert found[3] is None
    assert found[1].cache[2]["changed"] and found[1].cache[2]["stale"]
    assert [each["hits"] for each in found[1].cache[3:]] == [SIZE // 2] * 2


class KeepsItsOutput(nn.Module):
    """For plots, as attention layers do."""

    def forward(self, x):
        self.kept = x.detach()
        return x


def test_a_layer_that_keeps_its_output_is_named_as_it_is_never_found(caplog):
    expected = train(nn.Identity(), ToySet(SIZE))
    with caplog.at_level(logging.WARNING):
        found = train(KeepsItsOutput(), ToySet(SIZE), admission="always")
    assert found[0] == expected[0]
    assert [each["hits"] for each in found[1].cache] == [0] * 4
    assert caplog.text.count("layers change from pass to pass: layer 1.kept;") == 1


def test_a_layer_that_follows_one_that_trains_is_never_served(caplog):
    """It holds that one in a list, by which modules do not register it."""

    class Follows(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.others = [other]

        def forward(self, x):
            return x * self.others[0].weight.sum()

    def losses(**cache):
        other = nn.Linear(8, 8)
        nn.init.constant_(other.weight, 0.02)
        toy = toy_model(2)
        model = nn.Sequential(toy[0], Follows(other), other, *list(toy)[1:])
        engine = pt.PipeTransformer(
            model,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Schedule([2] * 4),
            config=config(cache=pt.CacheConfig(**cache)),
        )
        with engine:
            return [
                float(engine.step(batch))
                for _ in engine.epochs(4)
                for batch in engine.batches(ToySet(SIZE), SIZE)
            ]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = losses(enabled=False)
        torch.manual_seed(0)
        assert losses(admission="always") == expected
    assert "layers change from pass to pass: layer 1.others;" in caplog.text


def test_the_record_of_a_pass_says_why_samples_were_missed():
    found = train(nn.Tanh(), ToySet(SIZE))
    first, second = found[1].cache[:2]
    assert first["misses"] == first["absent"] == first["stored"] == SIZE
    assert second["hits"] == SIZE and second["misses"] == second["absent"] == 0
    assert first["bytes"] == second["bytes"] > SIZE * 8 * 4
    assert f"cache hits {SIZE}/{SIZE} in " in _lines(found[1])[1]
    record = replace(found[1].epochs[0])
    again = type(record).from_fields(
        {**vars(record), "segments": [], "shape": vars(record.shape)}
    )
    assert again.cache == record.cache


def test_evaluation_computes_frozen_layers_once():
    rows = []
    engine = pt.PipeTransformer(
        toy_model(3),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2, 2]),
        config=config(),
    )
    dev, losses = ToySet(10, seed=4), []
    with engine:
        first = model_of(engine)[0]
        first.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(SIZE), 12):
                engine.step(batch)
            for _ in range(3):
                before = sum(rows)
                found = engine.evaluate(dev, {"accuracy": accuracy}, name="dev")
                losses.append((found["loss"], sum(rows) - before))
        hits = run_of(engine).caches.of("dev", 10).counters.hits
    assert [computed for _, computed in losses] == [10, 0, 0, 0, 0, 0]
    assert hits == 5 * 10
    # Its values are those of the records: the same each time.
    assert losses[0][0] == losses[1][0] == losses[2][0] != losses[3][0]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (dict(verify="some"), r"CacheConfig\.verify: expected 'sampled' or 'all'"),
        (dict(audit_every=-1), r"CacheConfig\.audit_every: expected >= 0 hits"),
    ],
)
def test_wrong_settings_are_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        pt.CacheConfig(**fields)
