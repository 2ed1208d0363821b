"""Plans count on the cache for what its slab holds, and for no more."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.planner import search
from pipetransformer.run import caches as slabs
from pipetransformer.transformation.cache_capacity import cache_room
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import Block, ToySet

SAMPLES = 50
FREEZE = (0, 4, 4)


def run_frozen(engine, epochs=3):
    """Train; return the plan and slots of each epoch, and the run."""
    plans = []
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(SAMPLES), 12):
                engine.step(batch)
            plans.append((engine.plan, run_of(engine).in_force.cache_slots))
        return plans, run_of(engine)


def plan_with(budget):
    """Return the second epoch's plan and slots, and how the last pass was served."""
    cache = pt.CacheConfig(budget_bytes=budget)
    engine = make_engine(freeze=schedule(*FREEZE), config=config(cache=cache))
    plans, run = run_frozen(engine)
    plan, slots = plans[-1]
    assert plan.boundary == 5
    last = engine.history.epochs[-1]
    return plan, slots, run, (last.cache_hits, last.cache_hits + last.cache_misses)


def test_plan_counts_on_no_cache_where_not_one_record_fits():
    plan, slots, _, (hits, _) = plan_with(100)
    assert (plan.cache, slots, hits) == ("none", 0, 0)


def test_plan_counts_on_the_share_that_the_slab_holds():
    plan, slots, run, (hits, rows) = plan_with(20_000)
    assert plan.cache == "host" and plan.num_samples == SAMPLES
    assert 0 < slots < SAMPLES and (hits, rows) == (slots, SAMPLES)
    free = search(
        run.inputs.profile,
        dataclasses.replace(run.inputs.cluster, cache=None),
        boundary=5,
        global_batch=12,
        cache_tiers=("host",),
        num_samples=SAMPLES,
        max_replicas=1,
        cuts=plan.cuts,
        num_microbatches=plan.num_microbatches,
    )
    assert plan.predicted_step_ns > free.predicted_step_ns, "misses are computed"


def test_plan_counts_on_everything_where_the_slab_is_large():
    plan, slots, _, (hits, rows) = plan_with(None)
    assert (plan.cache, slots) == ("host", SAMPLES)
    assert hits == rows == SAMPLES


class BatchStatistics(Block):
    """A block whose rows depend on their batch, frozen or not."""

    def __init__(self, width):
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width, track_running_stats=False)


def test_plan_counts_on_no_cache_for_a_prefix_that_must_not_be_cached():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), BatchStatistics(8), *(Block(8) for _ in range(3))]
    engine = pt.PipeTransformer(
        nn.Sequential(*layers, nn.Linear(8, 3)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(1, 3),
        units=[1, 2, 3, 4, 5],
        # The last batch has two rows: batch norm takes them in one micro-batch only.
        config=config(plan=pt.PlanConfig(num_microbatches=1)),
    )
    plans, run = run_frozen(engine, 2)
    caches = [(plan.boundary, plan.cache) for plan, _ in plans]
    assert caches == [(1, "host"), (3, "none")]
    assert cache_room(run, 1, None).samples == SAMPLES
    assert cache_room(run, 2, None).samples == 0


def test_plan_counts_on_no_cache_that_could_not_be_made(monkeypatch):
    def refuse(**_):
        raise OSError("no memory")

    monkeypatch.setattr(slabs.ActivationCache, "create", refuse)
    engine = make_engine(freeze=schedule(1, 1, 4), config=config())
    plans, _ = run_frozen(engine)
    # It was counted on until it was tried; the plan that stays says so, too.
    assert [plan.cache for plan, _ in plans] == ["host", "none", "none"]


@pytest.fixture
def opened():
    """A run with a profile and no cache yet."""
    with make_engine(freeze=schedule(0), config=config()) as engine:
        engine.prepare(ToySet(SAMPLES), 12)
        yield run_of(engine)


def made(run, *, samples=SAMPLES, more_bytes=0):
    """Make what another rank of the run may have made."""
    slot = run.caches._create("train", SAMPLES).slot_bytes
    return slabs.ActivationCache.create(
        run_id=run.info.run_id,
        num_samples=samples,
        slot_bytes=slot + more_bytes,
        budget_bytes=10**6,
    )


@pytest.mark.parametrize("more_bytes", [0, 64])
def test_the_nodes_cache_is_used_if_it_has_the_samples_and_room_for_records(
    more_bytes, opened, caplog
):
    theirs = made(opened, more_bytes=more_bytes)
    found = opened.caches._attach(theirs.address, "train", SAMPLES)
    assert found.slot_bytes == theirs.slot_bytes
    ids, row = torch.arange(1), torch.ones(1, 4)
    found.store(ids, [row], boundary=0, fingerprint=7)
    assert theirs.fetch(ids, chain=[7])[0].rows.tolist() == [0]
    assert "own cache" not in caplog.text


@pytest.mark.parametrize(
    "other", [{"samples": SAMPLES - 1}, {"samples": SAMPLES + 1}, {"more_bytes": -64}]
)
def test_a_cache_of_other_sizes_than_this_run_makes_is_not_used(other, opened, caplog):
    """Plans counted on all of its slots, and no record had a place in one."""
    theirs = made(opened, **other)
    own = opened.caches._attach(theirs.address, "train", SAMPLES)
    assert (own.num_samples, own.num_slots) == (SAMPLES, SAMPLES)
    ids, row = torch.arange(1), torch.ones(1, 4)
    own.store(ids, [row], boundary=0, fingerprint=7)
    assert own.fetch(ids, chain=[7]) and not theirs.fetch(ids, chain=[7])
    text = f"got {theirs.num_samples} of {theirs.slot_bytes}"
    assert "own cache instead of the node's" in caplog.text and text in caplog.text


def explained(rank, available):
    """Train on ranks that see different memory; return what they planned by."""
    seen = SimpleNamespace(available_bytes=available[rank])
    slabs.host_memory = lambda: seen
    engine = make_engine(freeze=schedule(*FREEZE), config=config())
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(SAMPLES), 12):
                engine.step(batch)
        run = run_of(engine)
        told = engine.explain().to_dict()["inputs"]["notes"]
        return engine.plan.plan_hash, engine.plan.cache, run.in_force.cache_slots, told


@pytest.mark.distributed
def test_ranks_that_see_different_memory_plan_by_what_the_lead_sees():
    results = run_ranks(explained, 2, [80_000, 400])
    assert results[0] == results[1]
    _, cache, slots, notes = results[0]
    assert cache == "host" and 0 < slots < SAMPLES
    assert notes == [], "what is explained is what was planned for"
