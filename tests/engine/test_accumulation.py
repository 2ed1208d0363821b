"""Batches that share an optimizer step train like one large batch."""

import os
import signal

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.loop.accumulation import Accumulated, Window, window_of
from pipetransformer.run.arguments import Workload
from tests.engine.losses import SURVIVING
from tests.engine.scenario import config, is_active, moments, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.store_host import StoreHost
from tests.support.toy import ToySet, toy_model, toy_units

SAMPLES, BATCH, STEPS = 50, 6, 3  # windows of 18, 18 and 14 samples
IGNORED = -100


class Marked(ToySet):
    """Some targets count for nothing, more of them at the beginning."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, torch.tensor(IGNORED) if i % 7 < 4 - i // 15 else y


def counted_targets(targets):
    return (targets != IGNORED).sum()


def engine_of(*, freeze=None, dropout=0.0, loss=None, weight=None, **settings):
    return pt.PipeTransformer(
        toy_model(dtype=torch.float64, dropout=dropout),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.9),
        loss=loss or nn.CrossEntropyLoss(),
        loss_weight=weight,
        freeze=freeze or schedule(0),
        units=toy_units(),
        config=config(**settings),
    )


def data_of(kind=ToySet):
    return kind(SAMPLES, dtype=torch.float64)


def train(rank, batch, plan, kind="rows", epochs=2, **settings):
    """Train; return moments and the records, None on a rank that stands by."""
    options = {"weight": counted_targets} if kind == "tokens" else {}
    engine = engine_of(
        **options,
        **settings,
        plan=pt.PlanConfig(**plan),
        pipe=pt.PipeConfig(num_slots=plan.get("num_stages", 1)),
    )
    data = data_of(Marked if kind == "tokens" else ToySet)
    with engine:
        for _ in engine.epochs(epochs):
            for item in engine.batches(data, batch):
                engine.step(item)
        last = moments(engine) if is_active(engine) else None
        shape = (engine.plan.num_stages, engine.plan.num_replicas) if last else None
        assert engine.plan is None or engine.plan.accumulation_steps == settings.get(
            "accumulation_steps", 1
        ), "planned for the batches that share a step"
    return last and (last, engine.history.to_json()["epochs"], shape)


def assert_close(one, other):
    for name in ("weights", "tensors"):
        for a, b in zip(one[name], other[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for name in ("rates", "step", "scheduler"):
        assert one[name] == other[name]


ONE = {"num_stages": 1, "num_microbatches": 1}


@pytest.mark.parametrize("kind", ["rows", "tokens"])
@pytest.mark.parametrize("world, stages, microbatches", [(1, 1, 1), (1, 2, 2)])
def test_one_process_equals_the_large_batch(kind, world, stages, microbatches):
    (large, records, _) = train(0, BATCH * STEPS, ONE, kind)
    plan = {"num_stages": stages, "num_microbatches": microbatches}
    (small, own, shape) = train(0, BATCH, plan, kind, accumulation_steps=STEPS)
    assert shape == (stages, world)
    assert_close(small, large)
    for record, wanted in zip(own, records, strict=True):
        assert record["optimizer_steps"] == wanted["optimizer_steps"] == 3
        assert record["samples"] == record["unique_samples"] == SAMPLES
        assert record["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-9)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["rows", "tokens"])
@pytest.mark.parametrize("world, stages", [(2, 1), (4, 1), (4, 2)])
def test_replicas_equal_the_large_batch_of_one_process(kind, world, stages):
    large, records, _ = train(0, BATCH * STEPS, ONE, kind)
    plan = {"num_stages": stages, "reshape": "never"}
    settings = {"accumulation_steps": STEPS}
    found = run_ranks(_train_with, world, (BATCH, plan, kind, settings))
    active = [result for result in found if result is not None]
    assert active[0][2] == (stages, world // stages)
    for last, own, _ in active:
        assert_close(last, large)
        assert [e["train_loss"] for e in own] == pytest.approx(
            [e["train_loss"] for e in records], rel=1e-9
        )
        assert all(e["unique_samples"] == SAMPLES for e in own)


def _train_with(rank, given):
    batch, plan, kind, settings = given
    return train(rank, batch, plan, kind, **settings)


def count_reductions(rank, steps):
    """Train one pass; return how often gradients were reduced, and the records."""
    engine = engine_of(accumulation_steps=steps)
    reduced = []

    def hook(_, bucket):
        reduced.append(bucket.index())
        group = engine.model.process_group
        work = torch.distributed.ProcessGroup.allreduce(group, [bucket.buffer()])
        return work.get_future().then(lambda done: done.value()[0] / 2)

    with engine:
        for _ in engine.epochs(1):
            for number, batch in enumerate(engine.batches(data_of(), BATCH)):
                if number == 0:
                    engine.model.register_comm_hook(None, hook)
                engine.step(batch)
    return len(reduced), engine.history.to_json()["epochs"][0]["optimizer_steps"]


@pytest.mark.distributed
def test_gradients_are_reduced_with_the_last_batch_alone():
    for reduced, optimizer_steps in run_ranks(count_reductions, 2, STEPS):
        assert optimizer_steps == 3
        assert reduced == 3  # one bucket
    for reduced, _ in run_ranks(count_reductions, 2, 1):
        assert reduced == 9


def test_batches_of_a_step_draw_different_random_numbers():
    draws = []

    class Noted(nn.Module):
        def forward(self, x):
            noise = torch.rand(4, dtype=x.dtype)
            draws.append(noise)
            return x + noise

    engine = pt.PipeTransformer(
        nn.Sequential(Noted(), nn.Linear(4, 3, dtype=torch.float64)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(accumulation_steps=STEPS, plan=pt.PlanConfig(num_microbatches=2)),
    )
    with engine:
        for _ in engine.epochs(1):
            batches = engine.batches(data_of(), BATCH)
            for batch in batches:
                draws.clear() if batch.index == 0 else None
                engine.step(batch)
    assert len(draws) == len({tuple(noise.tolist()) for noise in draws}) == 18


def train_by_boundaries(rank):
    engine = engine_of(
        freeze=schedule(0, 2, 4, 6, 2, 0),
        freeze_every=1,
        accumulation_steps=STEPS,
        plan=pt.PlanConfig(slot_memory_bytes=31_000, reshape="always"),
    )
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data_of(), BATCH):
                engine.step(batch)
        last = moments(engine) if is_active(engine) else None
    return last, engine.history.to_json()


@pytest.mark.distributed
def test_a_plan_changes_between_optimizer_steps_only():
    results = run_ranks(train_by_boundaries, 4)
    history = results[0][1]
    assert len(history["transformations"]) >= 4
    for epoch in history["epochs"]:
        assert epoch["optimizer_steps"] == 3
        assert epoch["samples"] == epoch["unique_samples"] == SAMPLES
        ends = [s["samples"] for s in epoch["segments"]]
        assert set(ends) <= {14, 18, 32, 36, 50}, "a segment ended within a step"
    alone = train(
        0,
        BATCH * STEPS,
        ONE,
        freeze=schedule(0, 2, 4, 6, 2, 0),
        freeze_every=1,
        cache=pt.CacheConfig(enabled=False),
    )[0]
    for last, _ in results:
        if last is not None:
            assert_close(last, alone)


@pytest.mark.parametrize("asked, planned", [(3, 3), (4, 3), (8, 4), (100, 9)])
def test_plans_are_made_for_the_batches_that_a_pass_has(asked, planned):
    """Nine batches: steps of 4, 4 and 1 are three, of 8 and 1 two."""
    with engine_of(accumulation_steps=asked) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(data_of(), BATCH):
                engine.step(batch)
        plan, (record,) = engine.plan, engine.history.epochs
    assert plan.accumulation_steps == planned
    # Of an optimizer step, by the batches that there were; the pace is 1 before them.
    expected = plan.simulated_step_ns * 9 / record.optimizer_steps
    assert record.predicted_step_ns == pytest.approx(expected, abs=1)


def test_policies_are_told_of_optimizer_steps():
    policy = pt.freeze.Schedule([0])
    with engine_of(freeze=policy, accumulation_steps=STEPS) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data_of(), BATCH):
                engine.step(batch)
    told = [entry["progress"] for entry in policy.log]
    assert [each["step"] for each in told] == [0, 3, 6][: len(told)]
    assert {each["total_steps"] for each in told} == {6}


def lose(rank, dies_at, environment):
    """Rank 2 dies before a step of the second pass; the others train on."""
    os.environ.update(environment)
    engine = engine_of(
        accumulation_steps=STEPS,
        autodp=SURVIVING,
        plan=pt.PlanConfig(num_stages=1, reshape="never"),
    )
    with engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(data_of(), BATCH):
                if (rank, epoch, batch.index) == (2, 1, dies_at):
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.step(batch)
        last = moments(engine)
    return last, engine.history.to_json()


@pytest.mark.distributed
@pytest.mark.parametrize("dies_at", [3, 4, 5])
def test_survivors_take_the_batches_of_a_step_again(dies_at):
    with (
        StoreHost() as host,
        Ranks(lose, 3, dies_at, host.environment, timeout_s=60) as ranks,
    ):
        outcomes = ranks.outcomes([0, 1])
    alone = train(0, BATCH * STEPS, ONE)[0]
    for ok, value in outcomes.values():
        assert ok, value
        last, history = value
        assert_close(last, alone)
        assert history["recoveries"], "no rank was lost"
        for epoch in history["epochs"]:
            assert epoch["samples"] == epoch["unique_samples"] == SAMPLES
            assert epoch["optimizer_steps"] == 3


def test_gradients_of_a_step_that_was_left_are_dropped():
    engines = []
    for broken in (4, 3):  # within the second step, and at its beginning
        engine = engine_of(accumulation_steps=STEPS)
        with engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(data_of(), BATCH):
                    if batch.index == broken:
                        break
                    engine.step(batch)
            engines.append(moments(engine))
        assert [e["samples"] for e in engine.history.to_json()["epochs"]] == [18, 18]
    for name in ("weights", "tensors"):
        for a, b in zip(engines[0][name], engines[1][name], strict=True):
            assert torch.equal(a, b)


def test_gradients_of_a_pass_that_was_left_within_its_first_step_are_dropped():
    ends = []
    for broken in (2, 0):  # the next pass begins with the same batches of a step
        engine = engine_of(accumulation_steps=STEPS)
        with engine:
            for epoch in engine.epochs(2):
                for batch in engine.batches(data_of(), BATCH):
                    if (epoch, batch.index) == (0, broken):
                        break
                    engine.step(batch)
            ends.append(moments(engine))
    for name in ("weights", "tensors"):
        for a, b in zip(ends[0][name], ends[1][name], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("left_at", [3, 4])
def test_a_resumed_pass_equals_one_that_was_not_interrupted(tmp_path, left_at):
    whole = engine_of(accumulation_steps=STEPS)
    with whole:
        for _ in whole.epochs(1):
            for batch in whole.batches(data_of(), BATCH):
                if batch.index == left_at:
                    whole.save(tmp_path / "one.pt")  # also within a step
                whole.step(batch)
        wanted = moments(whole)
    resumed = engine_of(accumulation_steps=STEPS)
    with resumed:
        resumed.load(tmp_path / "one.pt")
        seen = []
        for _ in resumed.epochs(1):
            for batch in resumed.batches(data_of(), BATCH):
                seen.append(batch.index)
                resumed.step(batch)
        found = moments(resumed)
    assert seen == list(range(3, 9))
    for name in ("weights", "tensors"):
        for a, b in zip(found[name], wanted[name], strict=True):
            assert torch.equal(a, b)


def test_bare_inputs_are_refused():
    engine = engine_of(accumulation_steps=2)
    data = data_of()
    with engine:
        engine.prepare(data, BATCH)
        with pytest.raises(ValueError, match="expected batches of engine.batches"):
            engine.step(data.x[:6], data.y[:6])
        before = [p.detach().clone() for p in model_of(engine).parameters()]
        assert run_of(engine).state.step == 0
    assert all(p.isfinite().all() for p in before)


def workload(samples=SAMPLES, batch=BATCH, drop_last=False):
    count = samples // batch if drop_last else -(-samples // batch)
    return Workload(samples, batch, count, drop_last, lambda rows: None)


def test_windows_divide_every_pass_and_their_rows_add_up():
    for samples in (1, 5, 6, 49, 50, 54):
        for steps in (1, 2, 3, 4, 20):
            for drop_last in (False, True):
                load = workload(samples, drop_last=drop_last)
                done, rows, steps_taken = 0, 0, 0
                for number in range(load.num_batches):
                    window = window_of(number, done=done, steps=steps, workload=load)
                    assert window.first <= number < window.end
                    if window.ends_with(number):
                        rows += window.rows
                        done, steps_taken = number + 1, steps_taken + 1
                trained = load.num_batches * BATCH if drop_last else samples
                assert rows == (min(trained, samples) if load.num_batches else 0)
                assert steps_taken == -(-load.num_batches // steps)


def test_a_window_begins_where_a_resumed_pass_does():
    # Batches 0 to 4 are done, as a run with other accumulation_steps left them.
    window = window_of(5, done=5, steps=4, workload=workload())
    assert window == Window(5, 8, 18)


def test_batches_of_a_lost_plan_are_missing():
    window, so_far = Window(3, 6, 18), Accumulated()
    so_far.begin(window, 1)
    assert list(so_far.missing(window, 1, 5)) == []
    assert list(so_far.missing(window, 2, 5)) == [3, 4]
