"""What freezing saved: steps with frozen units against those of the same run before."""

import dataclasses

import pytest

from pipetransformer.report import (
    EpochRecord,
    History,
    PlanShape,
    Saved,
    SegmentRecord,
    TransformationRecord,
)


def segment(units, steps, seconds):
    shape = PlanShape(units, units, 1, 1, 1)
    return SegmentRecord(shape, 8 * steps, steps, seconds, 0.5, 0, 0, {}, [], 0)


def history(*passes, pauses=()):
    found = History(world_size=1, seed=0)
    for epoch, parts in enumerate(passes):
        found.epochs.append(
            EpochRecord(
                epoch, parts[-1].shape, 0, 0, 0, 0.0, 0.0, 0, 0, segments=list(parts)
            )
        )
    shape = PlanShape(0, 0, 1, 1, 1)
    for pause in pauses:
        found.add(TransformationRecord(1, shape, shape, pause, {}, "units"))
    return found


def test_steps_are_compared_with_those_that_train_the_most():
    found = history(
        [segment(0, 10, 2.0)],
        [segment(0, 2, 0.4), segment(4, 8, 0.8)],
        [segment(6, 10, 0.1)],
        pauses=(0.25, 0.5),
    )
    assert dataclasses.astuple(found.freezing) == pytest.approx(
        (18 * 0.2 - 0.9, 0.75, 0.2, 0.05)
    )
    assert found.to_json()["freezing"]["seconds"] == pytest.approx(2.7)


def test_frozen_steps_may_cost_more():
    found = history([segment(0, 10, 1.0)], [segment(4, 10, 1.5)])
    assert found.freezing.seconds == pytest.approx(-0.5)
    assert "has cost 0.50 s" in str(found.freezing)


def test_after_a_thaw_steps_count_as_before():
    found = history([segment(0, 10, 2.0)], [segment(4, 10, 1.0)], [segment(0, 10, 2.2)])
    assert found.freezing.seconds == pytest.approx(10 * 0.2 - 1.0)


def test_first_steps_that_take_longer_are_no_gain():
    warm_up, then = segment(0, 10, 9.0), segment(0, 12, 1.2)
    found = history([warm_up], [then], [segment(0, 3, 0.01)], [segment(4, 10, 1.0)])
    assert found.freezing.active_step_seconds == pytest.approx(0.1)
    assert found.freezing.seconds == pytest.approx(0.0)
    few = history([segment(0, 9, 9.0)], [segment(4, 10, 1.0)])
    assert few.freezing is None


@pytest.mark.parametrize(
    "passes",
    [
        [],
        [[segment(0, 10, 1.0)]],
        [[segment(3, 10, 1.0)], [segment(3, 10, 1.0)]],  # as under PEFT: from the start
        [[segment(0, 0, 0.0)], [segment(3, 10, 1.0)]],
    ],
)
def test_without_both_kinds_of_steps_nothing_is_told(passes):
    found = history(*passes)
    assert found.freezing is None
    assert found.to_json()["freezing"] is None


def test_a_record_comes_back_from_json():
    saved = Saved(-1.5, 0.25, 0.02, 0.0085)
    assert Saved.from_json(saved.to_json(), "freezing") == saved
