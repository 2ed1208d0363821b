"""What a step on devices waits for, and what comes a step late because of that.

Each run is in processes of its own: the device is registered for good.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
from unittest import mock

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autodp import PeerFailure
from pipetransformer.autodp.group import ActiveGroup
from tests.engine.scenario import config, make_engine, schedule
from tests.support.device_ranks import MARKS, NODE, pretend
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

pytestmark = MARKS


def check_waits(_rank, libraries, shape, freeze, cache):
    """Return what the host waits for in the last step, and which losses it knows."""
    fake = pretend(libraries)
    settings = config(
        devices=NODE[:2],
        plan=pt.PlanConfig(**shape, replicas="all"),
        clip_grad_norm=1.0,
        cache=pt.CacheConfig(enabled=cache, admission="always"),
    )
    engine = make_engine(freeze=freeze, config=settings)
    with engine:
        for _ in engine.epochs(3):
            losses = []
            fake.host_waits()
            for batch in engine.batches(ToySet(48), 12):
                losses.append(engine.step(batch))
                waits = fake.host_waits()  # of the step, and of loading its batch
                known = [bool(fake.is_known(loss)) for loss in losses]
        return waits, known, fake.violations()


@pytest.mark.parametrize("frozen, cache", [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("stages, microbatches", [(1, 1), (1, 2), (2, 2)])
def test_a_steady_step_waits_for_nothing_that_it_has_queued(
    libraries, stages, microbatches, frozen, cache
):
    shape = {"num_stages": stages, "num_microbatches": microbatches}
    given = shape, schedule(frozen), cache
    ((waits, known, found),) = run_ranks(check_waits, 1, libraries, *given)
    assert waits == ["copy to the host"]
    assert known == [True, True, True, False], "the loss of the step before"
    assert found == []


def test_replicas_wait_for_their_loss_and_for_reduced_gradients(libraries):
    shape = {"num_stages": 1, "num_microbatches": 1}
    for waits, known, found in run_ranks(
        check_waits, 2, libraries, shape, schedule(0), False
    ):
        first, *reduced, last = waits
        assert (first, last) == ("copy to the host", "event")
        # Of the pretended all-reduce, which goes through the host.
        assert set(reduced) <= {"copy to the host", "copy from the host"}
        assert all(known) and found == []


def check_broken_reduction(_rank, libraries):
    """Let the run fail while replicas wait for the third all-reduce."""
    pretend(libraries)
    settings = config(devices=NODE[:2], plan=pt.PlanConfig(num_stages=1))
    engine = make_engine(freeze=schedule(0), config=settings)
    calls, look = [], ActiveGroup.check_ended

    def fail_once(group):
        calls.append(group.size)
        if len(calls) == 3:
            group._plane.fail("test", "the way is gone")
        look(group)

    with (
        mock.patch.object(ActiveGroup, "check_ended", fail_once),
        pytest.raises(PeerFailure, match="the way is gone"),
        engine,
    ):
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(48), 12):
                parameters = list(model_of(engine).parameters())
                before = [p.detach().clone() for p in parameters]
                engine.step(batch)
    same = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    return calls, same


def test_what_a_broken_all_reduce_leaves_reaches_no_weight(libraries):
    for calls, same in run_ranks(check_broken_reduction, 2, libraries):
        assert calls in ([2, 2, 2], [2, 2]) and same


OWN_LOOPS = {
    "loss": lambda engine, batch: engine.loss(batch),
    "model": lambda engine, batch: nn.functional.cross_entropy(
        engine.model(batch), batch.targets
    ),
}


def check_own_nan(_rank, libraries, loop, bad_step, shared):
    """A loop whose loss is NaN once; return the error and the steps done by then."""
    pretend(libraries)
    settings = config(
        devices=NODE[:1],
        plan=pt.PlanConfig(num_stages=1, num_microbatches=1),
        accumulation_steps=2 if shared else 1,
    )
    engine = make_engine(freeze=schedule(0), config=settings)
    taken = 0
    with pytest.raises(FloatingPointError) as caught, engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(96), 12):
                if loop in ("step", "optimizer") and taken == bad_step:
                    with torch.no_grad():
                        for parameter in engine.model.parameters():
                            parameter.mul_(math.nan)
                if loop == "step":
                    engine.step(batch).zero_()  # the user's to change
                elif loop == "optimizer":
                    engine.loss(batch).backward()
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                else:
                    loss = OWN_LOOPS[loop](engine, batch)
                    engine.backward(loss * (math.nan if taken == bad_step else 1.0))
                    engine.update()
                taken += 1
    return str(caught.value), taken


@pytest.mark.parametrize("loop", ["loss", "model", "optimizer", "step", "step, shared"])
def test_a_loop_of_any_kind_ends_a_batch_after_its_loss_was_nan(libraries, loop):
    name, _, shared = loop.partition(", ")
    ((said, taken),) = run_ranks(check_own_nan, 1, libraries, name, 2, bool(shared))
    assert "expected a finite value, got nan" in said and taken == 3


class Told(pt.report.Callback):
    """Keeps what it is told of steps, and what the engine had done by then."""

    def __init__(self):
        self.steps = []
        self.engine = None

    def on_step(self, record):
        done = run_of(self.engine).state.step
        self.steps.append((record.step, record.loss, done))


def check_told_steps(_rank, libraries, devices):
    if devices:
        pretend(libraries)
    told = Told()
    settings = config(plan=pt.PlanConfig(num_stages=1), freeze_every=3)
    settings = dataclasses.replace(settings, devices=devices or None)
    engine = make_engine(freeze=schedule(0, 1, 2), config=settings, callbacks=[told])
    told.engine = engine
    losses = []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(48), 12):
                losses.append(float(engine.step(batch)))
    return told.steps, losses


def test_callbacks_are_told_of_each_step_with_its_own_loss(libraries):
    for devices in ((), NODE[:1]):
        ((told, losses),) = run_ranks(check_told_steps, 1, libraries, devices)
        assert [step for step, *_ in told] == list(range(1, 9))
        assert [loss for _, loss, _ in told] == losses
        assert [done for *_, done in told] == list(range(1, 9)), "before the next step"


def check_interval(_rank, libraries, devices):
    """Return losses of steps, and their sum as a checkpoint after each has it."""
    if devices:
        pretend(libraries)
    settings = config(plan=pt.PlanConfig(num_stages=1), freeze_every=100)
    settings = dataclasses.replace(settings, devices=devices or None)
    engine = make_engine(freeze=pt.freeze.Guarded(), config=settings)
    losses, sums = [], []
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(48), 12):
                losses.append(float(engine.step(batch)))
                sums.append(run_of(engine).state.losses.own)
    return losses, sums


def test_the_sum_of_losses_holds_the_step_that_was_just_taken(libraries):
    for devices in ((), NODE[:1]):
        ((losses, sums),) = run_ranks(check_interval, 1, libraries, devices)
        totals = list(itertools.accumulate(12 * loss for loss in losses))
        assert [total for total, _ in sums] == pytest.approx(totals)
        assert [rows for _, rows in sums] == [12, 24, 36, 48]


def check_nan(_rank, libraries, folder, bad_step):
    """Let a loss be NaN at a step; return the error, and what is on the disk."""
    fake = pretend(libraries)
    taken = []

    def loss(outputs, targets):
        taken.append(1)
        value = nn.functional.cross_entropy(outputs, targets)
        return value * (math.nan if len(taken) - 1 == bad_step else 1.0)

    settings = config(
        devices=NODE[:1],
        plan=pt.PlanConfig(num_stages=1, num_microbatches=1),
        checkpoint=pt.CheckpointConfig(directory=folder, every_steps=1),
        check_loss=False,
    )
    engine = make_engine(freeze=schedule(0), config=settings, loss=loss)
    with pytest.raises(FloatingPointError) as caught, engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
    return str(caught.value), sorted(os.listdir(folder)), fake.violations()


def check_saves(_rank, libraries, folder):
    """Ask for weights after a loss that was NaN; return what each call said."""
    pretend(libraries)
    settings = config(
        devices=NODE[:1], plan=pt.PlanConfig(num_stages=1, num_microbatches=1)
    )
    engine = make_engine(freeze=schedule(0), config=settings)
    said = []
    with contextlib.suppress(FloatingPointError), engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(48), 12):
                with torch.no_grad():
                    next(iter(engine.model.parameters())).mul_(math.nan)
                engine.step(batch)
                for call in (
                    engine.state_dict,
                    lambda: engine.save(os.path.join(folder, "a.pt")),
                    lambda: engine.export(os.path.join(folder, "b.pt")),
                ):
                    with pytest.raises(FloatingPointError, match="got nan at step 0"):
                        call()
                    said.append(os.listdir(folder))
    return said


def test_weights_that_a_loss_has_spoilt_are_not_saved(libraries, tmp_path):
    (said,) = run_ranks(check_saves, 1, libraries, str(tmp_path))
    assert said == [[], [], []]


@pytest.mark.parametrize("bad_step", [2, 3])  # the second one ends its pass
def test_a_loss_that_is_nan_ends_the_run_and_spoils_no_checkpoint(
    libraries, tmp_path, bad_step
):
    ((said, files, found),) = run_ranks(
        check_nan, 1, libraries, str(tmp_path), bad_step
    )
    assert f"expected a finite value, got nan at step {bad_step} on rank 0" in said
    assert said.endswith("read a step later: weights may have changed")
    steps = [int(re.search(r"(\d+)", name)[1]) for name in files]
    assert max(steps) == bad_step, "that of the step before"
    for name in files:
        state = torch.load(tmp_path / name, weights_only=True)["model"]
        assert all(bool(value.isfinite().all()) for value in state.values())
    assert found == []
