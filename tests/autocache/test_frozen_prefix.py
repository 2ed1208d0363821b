"""Which records a frozen prefix takes: of its own padding, and audited when kept."""

import logging
import threading
import time

import pytest
import torch
from torch import nn

from pipetransformer.autocache import ActivationCache, CacheFolder, Ragged
from pipetransformer.pipe import Workers
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock
from pipetransformer.skip import pop, skippable, stash

from .test_cache import make_cache, values

IDS = torch.arange(4)
LENGTHS = torch.tensor([1, 3, 2, 3])
INPUTS = torch.ones(4, 3, 8) * (torch.arange(3) < LENGTHS[:, None])[..., None]


class Pair(nn.Module):
    """Two tensors of the padded length."""

    def forward(self, hidden):
        return 2 * hidden, 3 * hidden


class Named(nn.Module):
    def forward(self, hidden):
        return {"hidden": 2 * hidden, "name": "twice"}


def run(cache, spec, *, dtype=torch.float32):
    layers = [Pair().eval()]
    inputs = INPUTS.to(dtype)
    with Workers(1) as workers:
        prefix = FrozenPrefix(layers, 1, workers, Clock(), seed=0, ragged=spec)
        found = prefix(lambda: inputs, IDS, cache, position=DrawPosition(0, 0))
    assert torch.equal(found[0], 2 * inputs) and torch.equal(found[1], 3 * inputs)
    return prefix.refusal


def spec(**fields):
    return Ragged(lambda inputs: LENGTHS, **fields)


def test_records_of_another_padding_are_misses_and_no_error():
    cache = make_cache(num_samples=4, ragged=True)
    specs = [spec(), spec(dim=(1, 1)), spec(fill=(0.0, 0.0)), spec(dim=(1,))]
    for each in specs:
        run(cache, each)
    assert cache.counters.hits == 0 and cache.counters.misses == 16
    cache.clear()
    run(cache, spec())
    run(cache, spec())
    assert cache.counters.hits == 4


def test_a_pass_that_writes_nothing_reads_records_of_structures():
    cache = make_cache(num_samples=4)
    for write in (True, False):  # each of them a plan of its own
        with Workers(1) as workers:
            prefix = FrozenPrefix([Named().eval()], 1, workers, Clock(), seed=0)
            for ids in IDS.split(2):
                given = INPUTS[ids]
                found = prefix(
                    lambda given=given: given,
                    ids,
                    cache,
                    position=DrawPosition(0, 0),
                    write=write,
                )
                assert torch.equal(found["hidden"], 2 * given)
                assert found["name"] == "twice"
    assert cache.counters.stored == 4
    assert cache.counters.hits == 2  # all but the first batch


def test_a_fill_that_a_tensor_cannot_hold_is_refused_before_it_is_stored(caplog):
    large = torch.finfo(torch.float32).min
    cache = make_cache(num_samples=4, ragged=True)
    with caplog.at_level(logging.WARNING):
        assert run(cache, spec(fill=large)) is None
        refusal = run(cache, spec(fill=large), dtype=torch.float16)
    assert "expected a fill that torch.float16 holds, got -3.4" in refusal
    assert "frozen prefix is not cached" in caplog.text
    assert cache.counters.stored == 4


def test_a_process_that_attaches_to_kept_records_audits_its_first_hit(tmp_path):
    first = make_cache()
    first.store(IDS, (values(IDS, 1),), boundary=1, fingerprint=1)
    keeper = CacheFolder(tmp_path)
    keeper.load(make_cache(), "train", 1)
    keeper.save(first, "train", 1)
    made = make_cache(audit_every=1000)
    CacheFolder(tmp_path).load(made, "train", 1)
    other = ActivationCache.attach(made.address, run_id="run", audit_every=1000)
    other.expect_earlier_records()
    for cache in (made, other):
        cache.fetch(IDS[:2], chain=[0, 1])
        assert cache.audit_due()
        cache.fetch(IDS[2:], chain=[0, 1])
        assert not cache.audit_due()
    empty = make_cache()
    fresh = ActivationCache.attach(empty.address, run_id="run", audit_every=9)
    fresh.expect_earlier_records()  # there are none
    fresh.store(IDS, (values(IDS, 1),), boundary=1, fingerprint=1)
    fresh.fetch(IDS, chain=[0, 1])
    assert not fresh.audit_due()


class Returns(nn.Module):
    """Gives what a function makes of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, hidden):
        return self.function(hidden)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x,) * 6, None),
        (
            lambda x: (x,) * 7,
            "layer 0: expected at most 6 tensors, as many as a record holds, got 7",
        ),
        (lambda x: x.reshape(-1, 1, 1, 2, 1, 4, 3), None),
        (
            lambda x: (x, x.reshape(-1, 1, 1, 2, 1, 4, 3, 1)),
            "layer 0: tensor 1: expected at most 6 dims in a row, as many as a record "
            "holds, got 7",
        ),
        (
            lambda x: x.to_sparse(),
            "layer 0: tensor 0: expected a plain dense tensor, got a "
            "torch.sparse_coo one",
        ),
    ],
)
def test_what_no_record_holds_is_refused_with_the_reason(function, reason, caplog):
    cache = make_cache(num_samples=4)
    with Workers(1) as workers, caplog.at_level(logging.WARNING):
        layers = [Returns(function).eval()]
        prefix = FrozenPrefix(layers, 1, workers, Clock(), seed=0)
        prefix(lambda: INPUTS, IDS, cache, position=DrawPosition(0, 0))
    assert prefix.refusal == reason and prefix.uses_cache == (reason is None)
    assert cache.counters.stored == (4 if reason is None else 0)
    assert cache.counters.full == 0 and "no slot" not in caplog.text
    assert reason is None or f"not cached: {reason}" in caplog.text


@skippable(stash="skip")
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return 2 * x


@skippable(pop="skip")
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip, 3 * skip


class Counted(nn.Module):
    """Tells which rows it has seen, and in which threads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        time.sleep(0.002)
        self.seen.append((threading.get_ident(), x[:, 0].tolist()))
        return x


def filling(layers, workers, **options):
    return FrozenPrefix(
        [layer.eval() for layer in layers],
        len(layers),
        workers,
        Clock(),
        devices=[torch.device("cpu")] * workers.num_workers,
        num_microbatches=3,
        fills=True,
        seed=0,
        **options,
    )


def rows_of_batch(number):
    return torch.arange(8.0 * number, 8.0 * number + 8)[:, None].expand(8, 2)


def test_what_runs_ahead_is_what_its_own_step_would_give():
    counted = Counted()
    with Workers(2) as workers:
        prefix = filling([counted, Stash(), nn.Identity(), Pop()], workers)
        ids = [torch.arange(8) for _ in range(3)]
        batches = [rows_of_batch(number) for number in range(3)]
        for number, given in enumerate(batches):
            first, second = prefix(
                lambda given=given: given,
                ids[number],
                None,
                position=DrawPosition(number, 0),
            )
            assert torch.equal(first, 3 * given) and torch.equal(second, 3 * given)
            if number < 2:
                prefix.run_ahead(
                    lambda number=number: batches[number + 1],
                    ids[number + 1],
                    None,
                    position=DrawPosition(number + 1, 0),
                )
        prefix.retire()
    rows = sorted(row for _, part in counted.seen for row in part)
    again = rows[:6]  # told apart once: which of two tensors have rows
    assert len(rows) == 24 + 4 and set(rows) == {float(n) for n in range(24)}, again
    assert {len(part) for _, part in counted.seen} == {2, 3, 4}


def test_a_batch_or_draws_that_were_not_foreseen_are_computed_anew():
    counted = Counted()
    with Workers(2) as workers:
        prefix = filling([counted], workers)
        foreseen, other = torch.arange(8), torch.arange(8)
        given = rows_of_batch(0)
        for ids, step in ((other, 1), (foreseen, 2)):
            prefix.run_ahead(
                lambda: rows_of_batch(1), foreseen, None, position=DrawPosition(1, 0)
            )
            found = prefix(lambda: given, ids, None, position=DrawPosition(step, 0))
            assert torch.equal(found, given)
        counted.seen.clear()
        prefix.run_ahead(
            lambda: rows_of_batch(1), foreseen, None, position=DrawPosition(1, 0)
        )
        again = prefix(lambda: given, foreseen, None, position=DrawPosition(1, 0))
        assert torch.equal(again, given), "other inputs than it was begun with"


def test_nothing_runs_once_a_prefix_is_retired_or_a_pass_begins():
    counted = Counted()
    with Workers(2) as workers:
        prefix = filling([counted] * 100, workers)
        for leave in (prefix.begin_pass, prefix.retire):
            prefix.run_ahead(
                lambda: rows_of_batch(0),
                torch.arange(8),
                None,
                position=DrawPosition(0, 0),
            )
            leave()
            seen = len(counted.seen)
            time.sleep(0.02)
            assert len(counted.seen) == seen < 300


def test_evaluations_and_caches_leave_alone_what_runs_ahead():
    cache = make_cache(num_samples=8)
    counted = Counted()
    with Workers(2) as workers:
        prefix = filling([counted], workers)
        ids = torch.arange(8)
        prefix.run_ahead(
            lambda: rows_of_batch(0), ids, cache, position=DrawPosition(0, 0)
        )
        assert counted.seen == [], "rows of a cache in use are not computed ahead"
        held, coming = rows_of_batch(2), rows_of_batch(0)
        prefix.run_ahead(lambda: coming, ids, None, position=DrawPosition(0, 0))
        found = prefix(
            lambda: held,
            torch.arange(8),
            None,
            position=DrawPosition(-1, 0),
            whole=True,
        )
        assert torch.equal(found, held)
        ready = prefix(lambda: coming, ids, None, position=DrawPosition(0, 0))
        assert torch.equal(ready, coming)
        assert sum(len(part) for _, part in counted.seen) == 16


def test_one_worker_fills_nothing():
    with Workers(1) as workers:
        prefix = filling([nn.Identity()], workers)
        assert not prefix.fills
