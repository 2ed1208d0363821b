"""What is left of a run, as its plan will change."""

import dataclasses
import threading

import pytest

import pipetransformer as pt
from pipetransformer.report import EpochRecord
from pipetransformer.run.forecast import Forecast
from pipetransformer.transformation.forecast import foresee
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.toy import ToySet

# With equal layers: 8 forward and backward; frozen ones are cached.
LAYERS = 8


class Left(pt.report.Callback):
    """Notes the time that is left after each step."""

    def __init__(self):
        self.seconds = []
        self.passes = []

    def on_step(self, step):
        self.seconds.append(step.seconds_left)

    def on_epoch(self, record):
        self.passes.append(record)


def trained(freeze, epochs, **changes):
    left = Left()
    engine = make_engine(freeze=freeze, config=config(**changes), callbacks=[left])
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
    return left


def test_a_step_tells_what_is_left_from_the_second_pass_on():
    left = trained(schedule(0), 3)
    assert left.seconds[:4] == [None] * 4
    first, second = left.passes[0].seconds, left.passes[1].seconds
    assert left.seconds[4] == pytest.approx(first * 7 / 4)
    assert left.seconds[7] == pytest.approx(first)
    assert left.seconds[8:] == pytest.approx([second * n / 4 for n in (3, 2, 1, 0)])


def test_passes_that_freeze_more_are_foreseen_as_shorter():
    left = trained(schedule(0, 0, 4, 4), 4)
    whole = left.passes[0].seconds
    # Of eight layers three are left from the third pass on; not all is the layers'.
    assert left.seconds[3] is None
    assert left.seconds[4] == pytest.approx(whole * (3 / 4 + 2 * 3 / LAYERS), rel=0.05)
    measured = left.passes[2].seconds
    assert left.seconds[12] == pytest.approx(measured * 3 / 4)


class AfterSteps(pt.freeze.Policy):
    """Freezes four units once so many steps are done; keeps what it was asked."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.asked, self.foreseen = steps, [], []

    def _choose(self, progress, stats):
        self.asked.append((progress.epoch, progress.step))
        return 4 if progress.step >= self.steps else 0

    def foresee(self, progress, points, *, steps=0):
        self.foreseen.append((progress.epoch, progress.step, points, steps))
        return super().foresee(progress, points, steps=steps)


@pytest.mark.parametrize("each", [4, 2], ids=["alone", "two batches a step"])
def test_a_policy_that_goes_by_steps_is_foreseen(each):
    policy = AfterSteps(2 * each)  # after two passes
    left = trained(policy, 4, accumulation_steps=4 // each)
    assert policy.asked == [(point, each * point) for point in range(5)]
    assert policy.foreseen == [(p, each * p, 3 - p, each) for p in range(4)]
    whole = left.passes[0].seconds
    if each == 4:
        expected = whole * (3 / 4 + 2 * 3 / LAYERS)
        assert left.seconds[4] == pytest.approx(expected, rel=0.05)


class Unknown(pt.freeze.Policy):
    """Decides by the loss, which nobody knows beforehand."""

    needs = frozenset({"loss"})

    def _choose(self, progress, stats):
        return 4 if progress.epoch > 1 else 0


@pytest.mark.parametrize("changes", [{}, {"freeze_every": 4}])
def test_what_is_not_known_beforehand_is_taken_to_stay(changes):
    policy = schedule(0, 0, 4, 4) if changes else Unknown()
    left = trained(policy, 4, **changes)
    assert left.seconds[4] == pytest.approx(left.passes[0].seconds * 11 / 4)


class Counting(pt.freeze.Policy):
    """Remembers more than its state tells, and can be copied or not."""

    def __init__(self, **held):
        super().__init__()
        self.asked, self.held = [], held

    def _choose(self, progress, stats):
        self.asked.append(progress.epoch)
        return 2 if len(self.asked) > 2 else 0


@pytest.mark.parametrize("held", [{}, {"lock": threading.Lock()}], ids=["", "a lock"])
def test_a_forecast_leaves_the_policy_as_it_was(held):
    policy = Counting(**held)
    left = trained(policy, 3)
    assert policy.asked == [0, 1, 2, 3]
    assert left.seconds[4] is not None


def test_a_boundary_that_fits_nowhere_counts_as_the_plan_in_force():
    engine = make_engine(freeze=schedule(4, 2), config=config())
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
            run, plan = run_of(engine), engine.plan
            break
        record = EpochRecord(
            epoch=0,
            shape=None,
            samples=48,
            unique_samples=48,
            optimizer_steps=4,
            seconds=2.0,
            train_loss=1.0,
            cache_hits=0,
            cache_misses=0,
        )
        longer = foresee(run, plan, record)
        assert longer.step_seconds[0] > 0.5
        run.inputs.cluster = dataclasses.replace(
            run.inputs.cluster, device_memory_bytes=1
        )
        assert foresee(run, plan, record) == Forecast(0, (0.5,), 4)


def test_a_run_that_is_resumed_within_a_pass_counts_what_is_left():
    found = Forecast(epoch=1, step_seconds=(2.0, 1.0), steps=10)
    assert found.seconds_left(20) == 30.0
    assert found.seconds_left(25) == 20.0
    assert found.seconds_left(30) == 10.0
    assert found.seconds_left(40) == found.seconds_left(41) == 0.0


def test_a_run_resumed_within_a_pass_foresees_whole_passes(tmp_path):
    wanted = pt.CheckpointConfig(directory=tmp_path, every_steps=1, resume=True)
    left = Left()
    for stops in (True, False):
        engine = make_engine(
            freeze=schedule(0), config=config(checkpoint=wanted), callbacks=[left]
        )
        with engine:
            for _ in engine.epochs(3):
                for batch in engine.batches(ToySet(48), 12):
                    engine.step(batch)
                    if stops and batch.index == 2:
                        break
                if stops:
                    break
        if stops:
            left = Left()
    assert [each.optimizer_steps for each in left.passes][0] < 4
    first = left.passes[0]
    each = first.seconds / first.optimizer_steps
    known = [seconds for seconds in left.seconds if seconds is not None]
    assert known[0] == pytest.approx(7 * each)
