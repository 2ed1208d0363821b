"""Which plans are the same to the engine, and batches too short for a plan."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import planner
from pipetransformer.autocache import CacheRates
from pipetransformer.explanation import alternatives
from pipetransformer.pipe import DeferredBatchNorm
from pipetransformer.planner import Plan, RunPlan
from pipetransformer.transformation import measured_inputs as planning
from pipetransformer.transformation import rewire
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

PLAN = Plan(
    boundary=2,
    num_stages=2,
    num_replicas=1,
    num_microbatches=4,
    samples_per_microbatch=1,
    global_batch=4,
    cuts=(2, 4, 6),
    prefix="replicated",
    cache="host",
)
RUN = {
    "boundary": {"boundary": 1, "cuts": (1, 4, 6)},
    "num_stages": {"num_stages": 1, "cuts": (2, 6)},
    "num_replicas": {"num_replicas": 2},
    "num_microbatches": {"num_microbatches": 5},
    "cuts": {"cuts": (2, 3, 6)},
    "schedule": {"schedule": "1f1b"},
    "checkpoint": {"checkpoint": "always"},
    "prefix": {"prefix": "pipelined"},
}
PREDICTED = {
    "cache": "none",
    "copies": "serial",
    "num_samples": 100,
    "accumulation_steps": 2,
    "global_batch": 3,
    "predicted_step_ns": 1,
    "lower_bound_ns": 1,
    "simulated_step_ns": 1,
    "bubble_fraction": 0.5,
    "bytes_per_stage": (1, 2),
    "idle_devices": 1,
    "refusals": ("K=3",),
    "reasons": ("because",),
    "profile_hash": 1,
    "cluster_hash": 1,
}
# Of the plan's own history, or made of the other fields.
RECORD = {"transition", "candidates", "plan_hash", "samples_per_microbatch"}


def _changed(**fields):
    return dataclasses.replace(PLAN, plan_hash=-1, **fields)


def test_every_field_of_a_plan_either_runs_or_predicts():
    names = {entry.name for entry in dataclasses.fields(Plan)}
    assert names == {*RUN, *PREDICTED, *RECORD}
    assert {entry.name for entry in dataclasses.fields(RunPlan)} == set(RUN)
    read = {name for name in names if f"plan.{name}" in inspect.getsource(rewire)}
    assert read == set(RUN)


@pytest.mark.parametrize("name", RUN)
def test_plans_that_run_differently_are_another_plan(name):
    assert _changed(**RUN[name]).run != PLAN.run


@pytest.mark.parametrize("name", PREDICTED)
def test_plans_that_differ_in_predictions_run_alike(name):
    other = _changed(**{name: PREDICTED[name]})
    assert other.plan_hash != PLAN.plan_hash
    assert other.run == PLAN.run and type(other.run) is RunPlan


def norm_model(norm=nn.BatchNorm1d):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), norm(8), nn.Tanh(), nn.Linear(8, 3))


def train_short(rank, *, replicas=1, rows=12, samples=26, **forced):
    """Train an epoch that ends with a batch of two rows; return its shares."""
    engine = pt.PipeTransformer(
        norm_model(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0),
        config=config(plan=pt.PlanConfig(max_replicas=replicas, **forced)),
    )
    shares = []
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(samples), rows):
                engine.step(batch)
                shares.append(batch.ids.tolist())
        plan = engine.plan
    (record,) = engine.history.epochs
    assert record.samples == record.unique_samples == samples
    return shares, plan.num_replicas, plan.num_microbatches


def test_short_last_batch_leaves_batch_norm_two_rows_per_micro_batch():
    # One row per micro-batch and channel: "Expected more than 1 value per channel".
    shares, _, microbatches = train_short(0, num_stages=1, num_microbatches=4)
    assert microbatches == 4
    assert [len(share) for share in shares] == [12, 12, 2]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, DeferredBatchNorm])
def test_plans_leave_batch_norms_two_rows_as_long_as_they_train(norm):
    # In the second epoch the norm is thawed: in eval mode when that is planned.
    engine = pt.PipeTransformer(
        norm_model(norm),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(2, 0),
        config=config(
            plan=pt.PlanConfig(num_stages=2), pipe=pt.PipeConfig(num_slots=2)
        ),
    )
    plans = []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
            plans.append(engine.plan)
    assert [(p.boundary, p.samples_per_microbatch) for p in plans] == [(2, 1), (0, 2)]


def prepared_with(memory):
    """Prepare two stages behind five frozen layers, within `memory` bytes a slot."""
    settings = config(
        plan=pt.PlanConfig(num_stages=2, slot_memory_bytes=memory),
        pipe=pt.PipeConfig(num_slots=2),
        cache=pt.CacheConfig(enabled=False),
    )
    engine = make_engine(freeze=schedule(4), config=settings)
    with engine:
        engine.prepare(ToySet(24), 12)
        run = run_of(engine)
        return engine.plan, run.inputs.profile, run.inputs.cluster


def test_slots_share_by_default_what_the_job_may_use_of_the_memory(monkeypatch):
    job = SimpleNamespace(total_bytes=10**12, limit_bytes=10**9 + 1)
    monkeypatch.setattr(planning, "host_memory", lambda: job)
    _, _, cluster = prepared_with(None)
    assert cluster.device_memory_bytes == 5 * 10**8
    _, _, cluster = prepared_with(2 * 10**9)
    assert cluster.device_memory_bytes == 2 * 10**9


def test_a_prefix_that_fits_only_in_pieces_is_refused():
    # Each worker runs the whole prefix, so it takes its bytes on every device.
    plan, profile, cluster = prepared_with(None)
    in_pieces = planner.search(
        profile,
        cluster,
        global_batch=12,
        boundary=plan.boundary,
        cuts=(5, 6, 8),
        prefix_placements=("pipelined",),
    )
    with pytest.raises(planner.InfeasiblePlan, match="K=2 does not fit"):
        prepared_with(max(in_pieces.bytes_per_stage))


def test_explanations_offer_no_prefix_in_pieces(monkeypatch):
    offered, search = [], alternatives.search

    def seen(profile, cluster, options, **choices):
        offered.append(options.prefix_placements)
        return search(profile, cluster, options, **choices)

    monkeypatch.setattr(alternatives, "search", seen)
    with make_engine(freeze=schedule(4)) as engine:
        engine.prepare(ToySet(24), 12)
        engine.explain()
    assert set(offered) == {("replicated", "filled")}


def train_short_in_two(rank):
    return train_short(rank, replicas=2, num_stages=1, num_microbatches=2)


@pytest.mark.distributed
def test_short_last_batch_leaves_batch_norm_two_rows_per_replica():
    first, second = run_ranks(train_short_in_two, 2)
    assert first[1:] == second[1:] == (2, 2)
    assert [len(share) for share in first[0]] == [6, 6, 2]
    assert [len(share) for share in second[0]] == [6, 6, 0]


@pytest.mark.parametrize(("limit", "context"), [(None, 1 << 30), (1 << 30, 0)])
def test_a_devices_context_is_part_of_its_memory_not_of_a_limit(
    limit, context, monkeypatch
):
    settings = config(plan=pt.PlanConfig(slot_memory_bytes=limit))
    with make_engine(freeze=schedule(0), config=settings) as engine:
        engine.prepare(ToySet(24), 12)
        run = run_of(engine)
        monkeypatch.setattr(type(run.slots), "type", "cuda")
        cluster = planning._cluster(run, CacheRates(), 0)
    assert cluster.context_bytes == context
