"""Options of a run do what they say, alongside plain loops and alongside each other."""

import dataclasses
import types
from math import inf

import pytest
import torch
from torch import nn
from torch.utils.data import get_worker_info

import pipetransformer as pt
from pipetransformer.pipe import is_recomputing
from pipetransformer.run import context
from pipetransformer.run.context import Run
from pipetransformer.transformation import propose as planning
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

CLIP, RATE = 0.05, 2.0
FROZEN = 3  # layers under two frozen units


def weights_of(engine):
    return [p.detach().clone() for p in model_of(engine).parameters()]


def train_clipped(rank, frozen, plan):
    """Train two epochs with gradients that are clipped.

    Returns:
        Ids of this rank's shares, weights, and (K, R); None on a rank that stands by.
    """
    engine = pt.PipeTransformer(
        toy_model(dtype=torch.float64),
        optimizer=lambda params: torch.optim.SGD(params, lr=RATE),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(frozen),
        units=toy_units(),
        config=config(
            clip_grad_norm=CLIP,
            plan=pt.PlanConfig(**plan),
            pipe=pt.PipeConfig(num_slots=plan["num_stages"]),
        ),
    )
    order = []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(50, dtype=torch.float64), 12):
                engine.step(batch)
                order.append(batch.ids.tolist())
        plan = engine.plan
    if plan is None:
        return None
    return order, weights_of(engine), (plan.num_stages, plan.num_replicas)


def clip_in_a_plain_loop(order, frozen):
    model, data = toy_model(dtype=torch.float64), ToySet(50, dtype=torch.float64)
    if frozen:
        model[:FROZEN].requires_grad_(False)
    active = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(active, lr=RATE)
    for ids in order:
        nn.functional.cross_entropy(model(data.x[ids]), data.y[ids]).backward()
        norm = nn.utils.clip_grad_norm_(active, CLIP)
        assert norm > 1.1 * CLIP, "nothing to clip"
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def assert_clipped(results, frozen, shape):
    orders = [order for order, _, _ in results]
    whole = [sum(parts, []) for parts in zip(*orders, strict=True)]
    expected = clip_in_a_plain_loop(whole, frozen)
    for _, weights, found in results:
        assert found == shape
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("stages", [1, 3])
def test_clipping_is_by_the_norm_over_all_stages(stages, frozen):
    result = train_clipped(0, frozen, {"num_stages": stages, "num_microbatches": 4})
    assert_clipped([result], frozen, (stages, 1))


@pytest.mark.distributed
def test_clipping_is_by_the_norm_of_the_whole_batch():
    # 50 samples in batches of 12 over 3 replicas: one has no row of the last batch.
    plan = {"num_stages": 1, "num_microbatches": 2, "max_replicas": 3}
    results = run_ranks(train_clipped, 3, 2, plan)
    assert_clipped(results, 2, (1, 3))


@pytest.mark.distributed
def test_clipping_is_by_the_norm_over_stages_and_replicas():
    plan = {"num_stages": 2, "num_microbatches": 2, "max_replicas": 2}
    results = run_ranks(train_clipped, 4, 0, plan)
    active = [result for result in results if result is not None]
    assert len(active) == 2
    assert_clipped(active, 0, (2, 2))


def train_recomputing(checkpoint, stages=2, micro=4):
    """Train an epoch with dropout; count the forward calls of the last layer."""
    calls = []
    engine = make_engine(
        freeze=pt.freeze.Never(),
        dtype=torch.float64,
        dropout=0.2,
        config=config(
            plan=pt.PlanConfig(num_stages=stages, num_microbatches=micro),
            pipe=pt.PipeConfig(num_slots=stages, checkpoint=checkpoint),
        ),
    )
    with engine:
        engine.prepare(ToySet(24, dtype=torch.float64), 12)
        for layer in (model_of(engine)[0], model_of(engine)[-1]):
            layer.register_forward_hook(
                lambda layer, *_: calls.append((id(layer), is_recomputing()))
            )
        for batch in engine.batches(ToySet(24, dtype=torch.float64), 12):
            engine.step(batch)
        assert engine.plan.checkpoint == checkpoint
    again = sum(recomputed for _, recomputed in calls)
    return weights_of(engine), len(calls) - again, again


def test_checkpointing_computes_again_and_changes_no_bit():
    steps, layers, micro = 2, 2, 4
    weights, calls, again = train_recomputing("never")
    assert (calls, again) == (steps * layers * micro, 0)
    for mode, recomputed in (("except_last", micro - 1), ("always", micro)):
        other, calls, again = train_recomputing(mode)
        assert calls == steps * layers * micro
        assert again == steps * layers * recomputed
        assert all(map(torch.equal, weights, other))


def train_with_cuts(cuts, slots=3):
    engine = make_engine(
        freeze=pt.freeze.Never(),
        dtype=torch.float64,
        config=config(
            plan=pt.PlanConfig(cuts=cuts, num_microbatches=2),
            pipe=pt.PipeConfig(num_slots=slots),
        ),
    )
    with engine:
        for batch in engine.batches(ToySet(24, dtype=torch.float64), 12):
            engine.step(batch)
        stages = engine._open().active().pipe.partitions
        names = [[id(layer) for layer in stage] for stage in stages]
        plan = engine.plan
    layers = [id(layer) for layer in model_of(engine)]
    return weights_of(engine), plan, names, layers


def test_forced_cuts_are_the_stages_that_run():
    reference, *_ = train_with_cuts((0, 8))
    for cuts in ((0, 1, 8), (0, 5, 6, 8)):
        weights, plan, stages, layers = train_with_cuts(cuts)
        assert tuple(plan.cuts) == cuts and plan.num_stages == len(cuts) - 1
        spans = zip(cuts, cuts[1:], strict=False)
        assert stages == [layers[a:b] for a, b in spans]
        assert all(map(torch.equal, weights, reference))


class LoadedBy(ToySet):
    """Notes on each sample whether a loader process made it."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        info = get_worker_info()
        return {"x": x, "by": torch.tensor(-1 if info is None else info.id)}, y


class TakeX(nn.Module):
    def forward(self, x, by):
        return x


def train_loading(num_workers):
    engine = pt.PipeTransformer(
        nn.Sequential(TakeX(), *toy_model(dtype=torch.float64)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0, 3),
        config=config(cache=pt.CacheConfig(enabled=False)),
    )
    ids, loaded_by = [], set()
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(
                LoadedBy(50, dtype=torch.float64), 12, num_workers=num_workers
            ):
                ids.append(batch.ids.tolist())
                loaded_by.update(batch.inputs["by"].tolist())
                engine.step(batch)
    assert [e.unique_samples for e in engine.history.epochs] == [50, 50, 50]
    return ids, loaded_by, weights_of(engine)


def test_loader_processes_give_the_same_samples():
    ids, by, weights = train_loading(0)
    same_ids, workers, same_weights = train_loading(2)
    assert by == {-1} and workers == {0, 1}
    assert same_ids == ids
    assert all(map(torch.equal, weights, same_weights))


def plan_differently(rank):
    """Plan as everybody does, except for rank 1 at the second epoch."""
    find = planning.next_plan

    def other(*args, **kwargs):
        plan = find(*args, **kwargs)
        reasons = (*plan.reasons, "this rank alone")
        return dataclasses.replace(plan, plan_hash=-1, reasons=reasons)

    if rank == 1:
        planning.next_plan = other
    engine = make_engine(freeze=schedule(0, 2))
    epochs = []
    try:
        with engine:
            for epoch in engine.epochs(3):
                epochs.append(epoch)
                for batch in engine.batches(ToySet(24), 12):
                    engine.step(batch)
    except RuntimeError as error:
        return epochs, type(error).__name__, str(error)
    return epochs, None, ""


@pytest.mark.distributed
def test_ranks_that_plan_differently_end_and_say_so():
    results = run_ranks(plan_differently, 2)
    assert [epochs for epochs, _, _ in results] == [[0], [0]]
    text = "plan hashes: expected the same on every active rank, got"
    # The second to come may hear of the first one's end before it ends itself.
    assert any(kind == "RuntimeError" and text in said for _, kind, said in results)
    assert all(kind in ("RuntimeError", "PeerFailure") for _, kind, _ in results)


@pytest.mark.parametrize(
    ("set_before", "processes", "wanted", "allowed", "bound", "threads"),
    [
        (8, 1, None, inf, 8, 8),
        (3, 1, None, inf, 8, 3),  # the user's
        (1, 1, None, inf, 8, 1),
        (1, 2, None, inf, 8, 4),  # torchrun's own
        (2, 2, None, inf, 8, 2),
        (8, 2, None, inf, 8, 4),
        (1, 1, 6, inf, 8, 6),
        (1, 2, None, 4.0, 8, 2),  # a container's cores
        (1, 2, None, 1.5, 8, 1),
        (1, 2, None, inf, 3, 3),  # bound to cores, each process to its own
        (1, 2, 6, 1.5, 3, 6),
    ],
)
def test_slots_take_no_more_threads_than_are_set_or_allowed(
    monkeypatch, set_before, processes, wanted, allowed, bound, threads
):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(bound)))
    monkeypatch.setattr(context, "host_cores", lambda: allowed)
    run = types.SimpleNamespace(
        config=pt.Config(pipe=pt.PipeConfig(threads_per_stage=wanted)),
        info=types.SimpleNamespace(local_world_size=processes),
        num_slots=processes,
        _threads_set=set_before,
    )
    assert Run.threads_per_stage.fget(run) == threads


def test_the_threads_that_are_set_are_those_before_the_engine():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with make_engine(freeze=schedule(0), config=config()) as engine:
            assert run_of(engine).threads_per_stage == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
