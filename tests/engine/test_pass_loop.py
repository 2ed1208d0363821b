"""Which passes a rank closes, and which it waits for."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest

from pipetransformer.pass_loop import PassLoop
from pipetransformer.report import EpochRecord, PlanShape
from pipetransformer.step_boundaries import StepBoundaries

RECORD = EpochRecord(2, PlanShape(0, 0, 1, 1, 1), 100, 100, 4, 2.0, 0.5, 0, 0)


@pytest.fixture
def passes():
    run = mock.MagicMock()
    run.state = SimpleNamespace(epoch=2, batch=0)
    made = PassLoop.__new__(PassLoop)
    made._run, made._survivors = run, mock.MagicMock()
    made._role, made._boundaries = SimpleNamespace(stands_by=False), mock.Mock()
    made._left_open = False
    made._open = mock.Mock(counted=object())
    return made


def test_a_pass_that_a_recovery_gave_is_left_open_until_the_script_begins_it(passes):
    # The others are in its first step: closing it would meet them in another call.
    passes._last_epoch = 1
    passes.finish()
    assert not passes._survivors.call.called and not passes._open.drop.called


def test_a_pass_that_the_script_has_left_is_closed(passes):
    passes._last_epoch = 2
    passes._record = mock.Mock()
    fields = dataclasses.asdict(RECORD)
    passes._survivors.call.return_value = fields
    passes.finish()
    assert passes._survivors.call.call_args.args == ("close", passes._close)
    assert passes._record.call_args.args[0].epoch == 2
    assert passes._open.drop.called and not passes._boundaries.stand_by.called


def test_a_rank_that_left_at_the_passes_end_can_be_taken_back(passes):
    # The others lost a rank right then, and change the plan again.
    passes._last_epoch, passes._role.stands_by = 2, True
    passes._record = mock.Mock()

    def join(call):
        passes._role.stands_by = False
        return 5

    passes._boundaries.stand_by.side_effect = join
    passes._survivors.call.return_value = dataclasses.asdict(RECORD)
    passes.finish()
    assert passes._boundaries.stand_by.call_args.args == ("pass end",)
    # The others count a segment, too; closing one is a collective.
    assert passes._open.open_segment.called and passes._record.called


def test_a_rank_that_joins_and_must_leave_at_once_waits_on():
    role, survivors = SimpleNamespace(stands_by=True), mock.Mock(recovered=False)
    changes = SimpleNamespace(joined=SimpleNamespace(position=3))
    boundaries = StepBoundaries(
        mock.MagicMock(), role, changes, mock.Mock(), survivors, mock.Mock()
    )

    def follow(*kinds, call):
        role.stands_by = survivors.follow.call_count > 1
        return {"kind": "pass_end"} if role.stands_by else None

    def lose_its_place(name, body):
        role.stands_by = True

    survivors.follow.side_effect, survivors.call.side_effect = follow, lose_its_place
    assert boundaries.stand_by() is None
    assert survivors.follow.call_count == 2
