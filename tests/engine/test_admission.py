"""Frozen layers run for every batch where reading costs more, and only there."""

import dataclasses
import time
from types import SimpleNamespace
from unittest import mock

import pytest

import pipetransformer as pt
from pipetransformer import autocache, planner
from pipetransformer.autocache import ActivationCache, CacheRates, TierRates
from pipetransformer.report import PlanShape
from pipetransformer.run.cache_costs import CacheCosts
from pipetransformer.run.caches import Room
from pipetransformer.transformation.cache_capacity import admission
from tests.engine.even_profile import ROW_NS, even_profile
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

SAMPLES, BATCH = 50, 12
FAST = TierRates(
    bytes_per_s=10**10,
    record_ns=1000,
    write_bytes_per_s=10**10,
    write_record_ns=1000,
)
MIDDLING = dataclasses.replace(FAST, record_ns=ROW_NS)  # of five layers' time
SLOW = dataclasses.replace(FAST, record_ns=100 * ROW_NS)


observe = CacheCosts.observe


def trained(rates, *, epochs=3, freeze=(0, 4, 4), each=None, learns=False, **cache):
    """Train with rates as measured; return the engine and what it says at the end.

    Unless it `learns`, costs stay as given, whatever else the machine does.
    """
    settings = config(cache=pt.CacheConfig(**cache))
    engine = make_engine(freeze=schedule(*freeze), config=settings)
    measured = mock.patch.object(autocache, "measure_rates", lambda *_, **__: rates)
    learned = observe if learns else lambda *_: None
    with measured, mock.patch.object(CacheCosts, "observe", learned), engine:
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(ToySet(SAMPLES), BATCH):
                engine.step(batch)
            if each is not None:
                each(epoch, run_of(engine))
        told = None
        if engine.plan is not None:
            told = engine.explain()
        return engine, run_of(engine), told


def losses(engine):
    return [record.train_loss for record in engine.history.epochs]


def test_slow_reads_make_the_engine_run_frozen_layers_with_the_same_losses():
    slow, run, told = trained(SLOW)
    last = slow.history.epochs[-1]
    assert run.in_force.cache_slots == 0 and not run.in_force.caches
    assert (last.cache_hits, last.cache_misses) == (0, 0)
    assert last.cache["recomputed"] == SAMPLES
    assert "train" not in run.caches._caches, "no memory is taken for it"
    assert told.plan.cache == "none" and told.cache["caches"] is False
    assert "recomputed; " in str(told) and told.inputs.notes == ()
    assert "recomputed; " in slow.history.transformations[-1].reason
    always, _, untold = trained(SLOW, admission="always")
    assert always.history.epochs[-1].cache_hits == SAMPLES and untold.cache is None
    assert losses(slow) == pytest.approx(losses(always), rel=1e-5)


def test_debug_checks_hits_whatever_they_cost():
    engine, _, told = trained(SLOW, debug=True)
    last = engine.history.cache[-1]
    assert last["audited"] == last["hits"] == SAMPLES and told.cache is None


@pytest.mark.parametrize("views", [2, 3])
def test_views_that_never_come_again_are_not_worth_a_cache(views):
    cached = trained(FAST, epochs=4, freeze=(4,) * 4, views=views)[0].history.cache
    assert [each["hits"] for each in cached[views:]] == [SAMPLES] * (4 - views)
    never = trained(FAST, epochs=3, freeze=(4,) * 3, views=3)[0].history.cache
    assert sum(each["hits"] for each in never) == 0


def test_an_encoded_record_is_priced_with_its_bytes():
    native = trained(FAST)[2].cache["record_bytes"]
    assert trained(FAST, codec="bf16")[2].cache["record_bytes"] == native // 2


def observed(inputs, *, hits=9, misses=1, replicas=1, read_ns=0.0, **cache):
    """What a pass of ten samples at boundary 4 tells of the costs."""
    costs = CacheCosts()
    segment = SimpleNamespace(
        shape=PlanShape(4, 4, 1, replicas, 1),
        cache_hits=hits,
        cache_misses=misses,
        prefix="replicated",
        cache=cache,
        samples=10,
        phase_seconds={"forward/cache_read": read_ns / 1e9},
    )
    costs.observe([segment], inputs)
    return costs


def test_waits_for_the_disk_make_the_disk_slow_and_not_the_memory():
    inputs = trained(FAST)[1].inputs
    disk = dataclasses.replace(FAST, bytes_per_s=10**6, write_bytes_per_s=10**6)
    inputs.rates = CacheRates(FAST, disk)
    size = inputs.profile.layers[3].boundary_bytes_per_sample
    spent = 9 * FAST.read_ns(size) + FAST.record_ns  # of reads from memory
    for waited, told in ((0, 4), (0, 1), (10**9, 4)):
        costs = observed(
            inputs,
            read_ns=told * spent + waited,
            disk_wait_ns=waited,
            disk_read_bytes=10**6,
            disk_read_ns=3 * 10**9,
            disk_written_bytes=10**6,
            disk_write_ns=7 * 10**9,
        )
        assert costs.reads == pytest.approx((1 + told) / 2)
        assert costs.disk_reads == pytest.approx(2.0, rel=1e-3)
        assert costs.disk_writes == pytest.approx(4.0, rel=1e-3)


def test_replicas_that_share_a_disk_do_not_make_it_slow():
    inputs = trained(FAST)[1].inputs
    inputs.rates = CacheRates(FAST, dataclasses.replace(FAST, bytes_per_s=10**6))
    moved = {"disk_read_bytes": 2 * 10**6, "disk_read_ns": 2 * 2 * 10**9}
    shared = observed(inputs, replicas=2, **moved)
    assert shared.disk_reads == pytest.approx(1.0, rel=1e-3)
    assert observed(inputs, **moved).disk_reads == pytest.approx(1.5, rel=1e-3)


def test_reads_of_the_host_are_learned_beside_those_of_copies():
    inputs = trained(FAST)[1].inputs
    near = dataclasses.replace(FAST, record_ns=100)
    size = inputs.profile.layers[3].boundary_bytes_per_sample
    spent = 4 * FAST.read_ns(size) + FAST.record_ns + 5 * near.read_ns(size)
    inputs.rates = CacheRates(FAST, None, near)
    for told in (1, 4):
        costs = observed(inputs, read_ns=told * spent, device_hits=5)
        assert costs.reads == pytest.approx((1 + told) / 2)
    # Nothing is learned where most of the time is that of copies, or nobody knows.
    for copied in (8, 9):
        assert observed(inputs, read_ns=4 * spent, device_hits=copied).reads == 1.0
    inputs.rates = CacheRates(FAST, None, FAST)
    assert observed(inputs, read_ns=4 * spent, device_hits=7, misses=0).reads == 1.0
    inputs.rates = CacheRates(FAST)
    assert observed(inputs, read_ns=4 * spent, device_hits=5).reads == 1.0


def test_a_disk_that_gives_nothing_back_is_learned_as_slow():
    inputs = trained(FAST)[1].inputs
    inputs.rates = CacheRates(FAST, dataclasses.replace(FAST, bytes_per_s=10**9))
    costs = observed(inputs, hits=0, misses=10, late=10, disk_read_ns=10**9)
    assert costs.disk_reads > 1000 and costs.reads == 1.0


def test_an_almost_free_prefix_is_recomputed(monkeypatch):
    def free(*args, **options):
        found = even_profile(*args, **options)
        layers = [
            dataclasses.replace(layer, forward_only_ns=(1,) * len(layer.forward_ns))
            for layer in found.layers
        ]
        return dataclasses.replace(found, layers=tuple(layers))

    monkeypatch.setattr(planner, "profile", free)
    engine, run, told = trained(FAST)
    assert not run.in_force.caches and engine.history.epochs[-1].cache_hits == 0
    assert "pays for no number of frozen layers" in str(told)


def test_fast_reads_are_made_and_plans_count_their_time():
    engine, run, told = trained(FAST)
    last = engine.history.epochs[-1]
    assert last.cache_hits == SAMPLES and "recomputed" not in last.cache
    assert told.plan.cache == "host" and told.cache["pays_from"] == 1
    assert "cached; would turn below" in str(told)
    rows, size = BATCH, told.cache["record_bytes"]
    read_ns = rows * (1000 + size / 10)
    always = trained(FAST, admission="always")[2]
    assert told.step_ns - always.step_ns == pytest.approx(read_ns, abs=2)
    assert last.predicted_step_ns == round(told.step_ns * last.pace)
    assert run.in_force.admission.caches


def test_reads_that_become_slow_in_the_run_end_the_use_of_the_cache(monkeypatch):
    fetch = ActivationCache.fetch

    def throttled(self, ids, **options):
        time.sleep(0.02 * len(ids))
        return fetch(self, ids, **options)

    monkeypatch.setattr(ActivationCache, "fetch", throttled)
    engine, run, told = trained(MIDDLING, epochs=4, freeze=(4,) * 4, learns=True)
    served = [record.cache_hits for record in engine.history.epochs]
    assert served[1] == SAMPLES and served[-1] == 0
    assert engine.history.transformations == [], "the plan is run as before"
    assert engine.history.epochs[-1].cache["recomputed"] == SAMPLES
    assert not run.in_force.caches and "recomputed; " in str(told)
    assert told.inputs.notes == ()


def on_ranks(rank, rates):
    engine, run, told = trained(rates[rank], epochs=3)
    told = None if told is None else told.plan.plan_hash
    return told, run.in_force.caches, run.inputs.rates


@pytest.mark.distributed
def test_ranks_decide_by_what_the_lead_has_measured():
    results = run_ranks(on_ranks, 2, [SLOW, FAST])
    assert [caches for _, caches, _ in results] == [False, False]
    assert [rates for *_, rates in results] == [CacheRates(SLOW)] * 2
    assert results[0][0] == results[1][0] is not None


def test_a_disk_that_was_left_is_priced_as_empty():
    """Records in memory say nothing of a disk that nothing was written to."""
    run = trained(FAST, epochs=4, freeze=(4,) * 4)[1]
    room = Room(10, SAMPLES - 10)
    slow = dataclasses.replace(FAST, write_bytes_per_s=1000, overlap=1.0)
    run.inputs.rates = CacheRates(FAST, slow)
    run.total_epochs, run.state.epoch = 4, 2
    told = []
    for used in (0, 10**6):
        cache = SimpleNamespace(used_bytes=10**6, disk_used_bytes=used)
        run.caches = SimpleNamespace(training=lambda cache=cache: cache)
        told.append(admission(run, run.in_force.plan.boundary, room))
    empty, written = told
    assert empty.caches and not empty.uses_disk
    assert written.caches and written.uses_disk
