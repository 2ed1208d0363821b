"""Plans whose schedule runs forward, loss and backward of micro-batches in turns."""

import dataclasses
import os
import signal

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autodp import PeerFailure
from tests.engine.losses import SURVIVING
from tests.engine.scenario import config, is_active, make_engine, schedule, train
from tests.support.private import model_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.toy import ToySet

TURNS = ("1f1b", "zb-h1")
SHRINKING = {"slot_memory_bytes": 27_000, "reshape": "always"}


def settings(order, *, plan=None, **changes):
    return config(
        plan=pt.PlanConfig(**(plan or {"num_stages": 2, "num_microbatches": 4})),
        pipe=pt.PipeConfig(num_slots=2, schedule=order),
        **changes,
    )


def weights(engine):
    return [p.detach().clone() for p in model_of(engine).parameters()]


def close(one, other, tolerance=1e-12):
    return all(
        torch.allclose(a, b, rtol=0, atol=tolerance)
        for a, b in zip(one, other, strict=True)
    )


def fit(order, own_loop=False, loss=None, data=None, **changes):
    engine = make_engine(
        freeze=schedule(0),
        dtype=torch.float64,
        loss=loss,
        config=settings(order, **changes),
    )
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data or ToySet(50, dtype=torch.float64), 12):
                if own_loop:
                    output = engine.model(batch)
                    engine.backward(nn.functional.cross_entropy(output, batch.targets))
                    engine.update()
                else:
                    engine.step(batch)
        return weights(engine), engine.plan, engine.history


def turned(rank, order):
    """Train with layers that freeze, on more and more replicas."""
    options = {"dtype": torch.float64}
    options["config"] = config(
        plan=pt.PlanConfig(**SHRINKING, num_microbatches=None),
        pipe=pt.PipeConfig(schedule=order),
    )
    found = train(rank, schedule(0, 2, 4, 6), 4, options)
    return found["model"], found["history"]["epochs"], found["before"]


@pytest.mark.distributed
@pytest.mark.parametrize("order", TURNS)
def test_changes_of_plan_and_the_cache_lose_nothing(order):
    plain = run_ranks(turned, 4, "gpipe")
    found = run_ranks(turned, 4, order)
    assert close(found[0][0], plain[0][0])
    assert found[0][2] == pytest.approx(plain[0][2], rel=1e-12)
    shapes = [(e["num_stages"], e["num_replicas"]) for e in found[0][1]]
    assert len(set(shapes)) > 1, shapes
    assert sum(e["cache_hits"] for e in found[0][1]) > 0
    for epoch in found[0][1]:
        assert epoch["unique_samples"] == 50


@pytest.mark.parametrize("order", TURNS)
def test_a_loop_of_the_users_own_runs_gpipe_under_any_plan(order):
    expected, _, _ = fit("gpipe")
    found, plan, _ = fit(order, own_loop=True)
    assert plan.schedule == order
    assert close(found, expected)


def test_memory_of_fewer_microbatches_lets_a_shorter_pipeline_fit():
    """Activations of all micro-batches fit four slots, those of K - j fit two."""

    def plan_of(order, stages):
        run = config(
            plan=pt.PlanConfig(
                slot_memory_bytes=100_000, num_microbatches=8, num_stages=stages
            ),
            pipe=pt.PipeConfig(num_slots=4, schedule=order),
        )
        with make_engine(freeze=schedule(0), depth=8, config=run) as engine:
            data = ToySet(256)
            for _ in engine.epochs(1):
                for batch in engine.batches(data, 256):
                    engine.step(batch)
            return engine.plan

    assert plan_of("gpipe", 4).schedule == "gpipe"
    with pytest.raises(ValueError, match="K=2 does not fit"):
        plan_of("gpipe", 2)
    assert plan_of("1f1b", 2).schedule == "1f1b"
    chosen = plan_of("auto", 2)
    assert chosen.schedule in TURNS
    assert any(chosen.schedule in reason for reason in chosen.reasons)


def test_fp16_scales_each_microbatch_before_its_backward():
    seen = []

    class Seen(nn.CrossEntropyLoss):
        def forward(self, outputs, targets):
            value = super().forward(outputs, targets)
            if value.requires_grad:
                value.register_hook(lambda grad: seen.append(float(grad)))
            return value

    def run(order):
        seen.clear()
        engine = make_engine(
            freeze=schedule(0), loss=Seen(), config=settings(order, amp="fp16")
        )
        with engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(48), 12):
                    engine.step(batch)
            losses = [e.train_loss for e in engine.history.epochs]
        return losses, max(seen), weights(engine)

    plain, whole_scale, expected = run("gpipe")
    for order in TURNS:
        losses, scale, found = run(order)
        assert losses == pytest.approx(plain, rel=1e-2)
        assert scale >= 2**8 and whole_scale >= 2**8, "gradients begin scaled"
        assert close(found, expected, 5e-3)


@pytest.mark.parametrize("order", TURNS)
def test_a_loss_that_is_not_finite_changes_no_weight(order):
    class Bad(nn.CrossEntropyLoss):
        calls = 0

        def forward(self, outputs, targets):
            value = super().forward(outputs, targets)
            Bad.calls += 1
            return value * float("nan") if Bad.calls == 40 else value

    engine = make_engine(
        freeze=schedule(0), loss=Bad(), config=settings(order, check_loss=False)
    )
    before = None
    with pytest.raises(FloatingPointError, match="expected a finite value, got nan"):
        with engine:
            for _ in engine.epochs(9):
                for batch in engine.batches(ToySet(48), 12):
                    before = weights(engine)
                    engine.step(batch)
    assert before is not None
    assert close(weights(engine), before, 0.0)


@pytest.mark.parametrize("order", TURNS)
def test_a_sum_over_rows_is_refused_at_the_first_batch(order):
    with pytest.raises(ValueError, match="loss: expected a mean over rows"):
        fit(order, loss=nn.CrossEntropyLoss(reduction="sum"))


def test_targets_that_microbatches_cannot_share_are_refused():
    class Named(ToySet):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x, (y, f"name {i}")

    with pytest.raises(ValueError, match="expected targets of tensors with 12 rows"):
        fit(
            "1f1b",
            loss=lambda out, given: nn.functional.cross_entropy(out, given[0]),
            data=Named(48, dtype=torch.float64),
        )


def test_a_loss_that_trains_and_unknown_schedules_are_refused():
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs, targets):
            return self.scale * nn.functional.cross_entropy(outputs, targets)

    with pytest.raises(ValueError, match="PipeConfig.schedule: expected 'gpipe' with"):
        make_engine(freeze=schedule(0), loss=Trained(), config=settings("auto"))
    with pytest.raises(ValueError, match="PipeConfig.schedule: expected 'gpipe', '1f"):
        pt.PipeConfig(schedule="zbh1")


def survive(rank, order, dies):
    """Train on two pipelines of two stages; one of them dies in a step."""
    run = dataclasses.replace(
        settings(order, plan={"num_stages": 2, "num_microbatches": 2}),
        autodp=SURVIVING,
    )
    engine = make_engine(freeze=schedule(0, 2), dtype=torch.float64, config=run)
    data = ToySet(48, dtype=torch.float64)
    try:
        with engine:
            for epoch in engine.epochs(3):
                for number, batch in enumerate(engine.batches(data, 12)):
                    if dies and rank == 2 and (epoch, number) == (1, 2):
                        os.kill(os.getpid(), signal.SIGKILL)
                    engine.step(batch)
            seen = [e.unique_samples for e in engine.history.epochs]
            return (weights(engine), seen) if is_active(engine) else None
    except PeerFailure as failure:
        return str(failure)


@pytest.mark.distributed
@pytest.mark.parametrize("order", TURNS)
def test_survivors_of_a_kill_finish_as_if_nothing_had_happened(order):
    expected, _ = run_ranks(survive, 4, order, False)[0]
    with Ranks(survive, 4, order, True) as ranks:
        outcomes = ranks.outcomes([0, 1, 3])
    own, seen = outcomes[0][1]
    assert close(own, expected) and seen == [48, 48, 48]
