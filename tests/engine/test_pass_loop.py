"""Which passes a rank closes, and which it waits for."""

import dataclasses
from types import SimpleNamespace

import pytest

from pipetransformer.autofreeze import LossSum
from pipetransformer.checkpoint.autosave import AutoSave
from pipetransformer.loop.epoch import PassLoop
from pipetransformer.loop.step_boundaries import StepBoundaries
from pipetransformer.progress.counts import Pass
from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.progress.sharding import Loading
from pipetransformer.recovery.retrying import RetriedCalls
from pipetransformer.replica.replica import Replica
from pipetransformer.replica.role import Role
from pipetransformer.report import EpochRecord, PlanShape
from pipetransformer.run.arguments import Workload
from pipetransformer.run.cache_costs import CacheCosts
from pipetransformer.run.control_log import ControlLog
from pipetransformer.run.measured_costs import MeasuredCosts
from pipetransformer.state.state import TrainingState
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.background import Ahead
from pipetransformer.transformation.proposal import Proposal
from tests.engine.runs import make_run
from tests.engine.stand_ins import stand_in

RECORD = EpochRecord(2, PlanShape(0, 0, 1, 1, 1), 100, 100, 4, 2.0, 0.5, 0, 0)
LOADING = Loading(range(4), 2, None, 0, False, False)


def run_in(epoch=2):
    return make_run(
        state=TrainingState(None, epoch=epoch),
        workload=Workload(4, 2, 2, False, lambda rows: None),
        costs=stand_in(MeasuredCosts, cache=stand_in(CacheCosts)),
        control_log=stand_in(ControlLog),
    )


def make_role(run, *, active=True):
    role = Role(run)
    role.replica = stand_in(Replica, prefix=None) if active else None
    return role


@pytest.fixture
def passes():
    """A pass loop with all that it speaks to."""
    made = SimpleNamespace(run=run_in())
    made.role = make_role(made.run)
    made.boundaries = stand_in(StepBoundaries)
    made.survivors = stand_in(RetriedCalls)
    signals = {"loss": 0.25, "plasticity": None}
    closed = {"record": dataclasses.asdict(RECORD), "signals": signals}
    made.survivors.call.return_value = closed
    made.open = stand_in(OpenPass, counted=Pass())
    made.open.batches.return_value = (batch for batch in ())
    autosave = stand_in(AutoSave)
    made.loop = PassLoop(
        made.run, made.role, made.boundaries, made.survivors, made.open, autosave
    )
    return made


def recorded(passes):
    return [record.epoch for record in passes.run.history.epochs]


def test_a_pass_that_a_recovery_gave_is_left_open_until_the_script_begins_it(passes):
    # The others are in its first step: closing it would meet them in another call.
    passes.run.state.epoch = 1
    list(passes.loop.iterate(LOADING))
    passes.run.state.epoch = 2
    passes.loop.finish()
    assert not passes.survivors.call.called and not passes.open.drop.called
    assert recorded(passes) == []


def test_a_pass_that_the_script_has_left_is_closed(passes):
    list(passes.loop.iterate(LOADING))
    passes.loop.finish()
    (call,) = passes.survivors.call.call_args_list
    assert call.args[0] == "close"
    assert recorded(passes) == [2]
    assert passes.open.drop.called and not passes.boundaries.stand_by.called
    passes.run.control_log.tell.assert_called_once_with("pass_end", lead=False)


def test_the_loss_that_a_survivor_has_shared_is_the_one_that_is_decided_by(passes):
    passes.run.state.losses = LossSum()
    passes.run.state.losses.add(lambda: 9.0, 1)  # the others' rows are not known here
    list(passes.loop.iterate(LOADING))
    passes.loop.finish()
    assert passes.run.state.losses.take() == 0.25


def test_a_rank_that_left_at_the_passes_end_can_be_taken_back(passes):
    # The others lost a rank right then, and change the plan again.
    list(passes.loop.iterate(LOADING))
    passes.open.open_segment.reset_mock()
    replica = passes.role.replica

    def leave():
        passes.role.replica = None

    def join(call):
        passes.role.replica = replica
        return 5

    passes.boundaries.at_end.side_effect = leave
    passes.boundaries.stand_by.side_effect = join
    passes.loop.finish()
    assert passes.boundaries.stand_by.call_args.args == ("pass end",)
    # The others count a segment, too; closing one is a collective.
    assert passes.open.open_segment.called and recorded(passes) == [2]


def test_a_rank_that_joins_and_must_leave_at_once_waits_on():
    run = run_in()
    role = make_role(run, active=False)
    survivors = stand_in(RetriedCalls, recovered=False)
    changes = stand_in(Changes, joined=stand_in(Proposal, position=3))
    boundaries = StepBoundaries(
        run, role, changes, stand_in(Ahead), survivors, stand_in(OpenPass)
    )

    def follow(*kinds, call):
        if survivors.follow.call_count > 1:
            return {"kind": "pass_end"}
        role.replica = stand_in(Replica)
        return None

    def lose_its_place(name, body):
        role.replica = None

    survivors.follow.side_effect, survivors.call.side_effect = follow, lose_its_place
    assert boundaries.stand_by() is None
    assert survivors.follow.call_count == 2
