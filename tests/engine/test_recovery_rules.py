"""What a recovery must not forget, each rule alone; no processes."""

import dataclasses
import types

import pytest
import torch

from pipetransformer.autodp import AutoDPConfig, PeerFailure
from pipetransformer.checkpoint.autosave import AutoSave
from pipetransformer.config import Config
from pipetransformer.loop import coordinator
from pipetransformer.loop.coordinator import Coordinator
from pipetransformer.loop.epoch import PassLoop
from pipetransformer.loop.step_boundaries import StepBoundaries
from pipetransformer.planner import Plan
from pipetransformer.progress.counts import Counts
from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.progress.sharding import Loading
from pipetransformer.recovery.decision import RankReport
from pipetransformer.recovery.resume import Resumption, alike
from pipetransformer.recovery.retrying import RetriedCalls
from pipetransformer.replica.replica import Replica
from pipetransformer.replica.role import Role
from pipetransformer.report import EpochRecord, PlanShape
from pipetransformer.run.arguments import Workload
from pipetransformer.run.control_log import ControlLog
from pipetransformer.run.layout import Layout
from pipetransformer.run.step_loss import StepLoss
from pipetransformer.state.state import Integrity, TrainingState
from pipetransformer.transformation import attempts as changes_module
from pipetransformer.transformation import rank_layout as placing
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.phases import Outcome
from pipetransformer.transformation.proposal import Proposal
from tests.engine.runs import make_run, plane_of
from tests.engine.stand_ins import stand_in

SHAPE = PlanShape(0, 0, 1, 1, 1)


def make_role(run, *, active=True):
    role = Role(run)
    role.replica = stand_in(Replica, prefix=None) if active else None
    return role


def outcome(*, committed, replica=None):
    proposal = stand_in(Proposal, layout=Layout((0,), (0,)), position=None)
    return Outcome(committed, proposal, replica, {}, reason="" if committed else "no")


def recover(monkeypatch, result):
    """Return the run and the operations after a recovery at operation 7."""
    run = make_run(plane=plane_of())
    run.state.become(Integrity.WHOLE)
    monkeypatch.setattr(changes_module, "prepare", lambda *_: None)
    monkeypatch.setattr(changes_module, "conclude", lambda *_: result)
    monkeypatch.setattr(changes_module.records, "learn", lambda *_: None)
    run.control_log.catch_up(6, {"of": 6})
    role = make_role(run, active=False)
    Changes(run, role).recover(3, None, 7, {"of": 7})
    return run, run.control_log


def test_after_an_aborted_recovery_the_state_can_still_be_saved(monkeypatch):
    run, log = recover(monkeypatch, outcome(committed=False))
    assert run.state.can_be_saved  # else nobody would write the emergency checkpoint
    assert log.done == 6


def test_a_rank_that_catches_up_knows_the_result_it_may_have_to_pass_on(monkeypatch):
    _, log = recover(monkeypatch, outcome(committed=True, replica=stand_in(Replica)))
    assert (log.done, log.result) == (7, {"of": 7})


def test_a_pass_that_is_still_open_stays_in_its_epoch(monkeypatch):
    layout = Layout((0,), (0,))
    monkeypatch.setattr(placing, "placed", lambda *_: (run.in_force.plan, layout))
    state = TrainingState(None, step=10, epoch=1, batch=5, num_batches=5)
    run = make_run(plan=stand_in(Plan), state=state)
    proposal = placing.propose_again(
        run, 2, able=(0,), whole=(0,), operations=9, position=None
    )
    assert (proposal.progress["epoch"], proposal.progress["batch"]) == (1, 5)
    # A checkpoint begins with the next epoch instead.
    assert (state.progress()["epoch"], state.progress()["batch"]) == (2, 0)


@pytest.mark.parametrize(("joins", "nodes"), [(False, 1), (True, 2)])
def test_a_rank_that_joins_the_first_batch_divides_the_pass_as_it_began(joins, nodes):
    state = TrainingState(None, pass_nodes=2)  # the other node was lost meanwhile
    run = make_run(plane=plane_of(1), state=state, layout=Layout((0, 1), (0, 0)))
    open_pass = OpenPass(run, make_role(run), stand_in(Changes))
    samplers = []

    class Noted(Loading):
        def batches(self, sampler):
            samplers.append(sampler)

    open_pass.begin(Noted(range(8), 4, None, 0, False, False), counts=not joins)
    open_pass.batches(0)
    (sampler,) = samplers
    assert (state.pass_nodes, sampler.num_nodes) == (nodes, nodes)


def loop(run, role, boundaries, survivors, open_pass):
    return PassLoop(run, role, boundaries, survivors, open_pass, stand_in(AutoSave))


def test_a_pass_that_a_recovery_has_brought_is_recorded_once():
    run = make_run(
        workload=Workload(2, 1, 2, False, lambda rows: None),
        control_log=stand_in(ControlLog),
    )
    survivors, open_pass = stand_in(RetriedCalls), stand_in(OpenPass)
    passes = loop(run, make_role(run), stand_in(StepBoundaries), survivors, open_pass)
    both = [EpochRecord(n, SHAPE, 2, 2, 2, 1.0, 0.5, 0, 0) for n in (0, 1)]
    run.history.epochs.append(both[0])  # of the rank that had closed the pass
    for record in both:
        run.state.epoch, open_pass.counted = record.epoch, object()
        open_pass.batches.return_value = (batch for batch in ())
        signals = {"loss": None, "plasticity": None}
        closed = {"record": dataclasses.asdict(record), "signals": signals}
        survivors.call.return_value = closed
        list(passes.iterate(Loading(range(2), 1, None, 0, False, False)))
        passes.finish()
    assert [record.epoch for record in run.history.epochs] == [0, 1]


def test_a_rank_that_stands_by_since_its_last_batch_waits_for_the_passes_end():
    run = make_run(
        workload=Workload(3, 1, 3, False, lambda rows: None),
        control_log=stand_in(ControlLog),
    )
    role, boundaries = make_role(run), stand_in(StepBoundaries)
    boundaries.stand_by.return_value = None
    open_pass = stand_in(OpenPass, counted=object())
    batches = (types.SimpleNamespace(index=n) for n in range(3))
    open_pass.batches.return_value = batches
    passes = loop(run, role, boundaries, stand_in(RetriedCalls), open_pass)
    for _ in passes.iterate(Loading(range(3), 1, None, 0, False, False)):
        role.replica = open_pass.counted = None  # by a recovery in its step
        break  # the user's own, on every rank at this batch
    for _ in range(2):
        passes.finish()
    boundaries.stand_by.assert_called_once_with("pass end")


def test_a_failure_that_no_lost_rank_explains_ends_the_run_after_some_attempts(
    monkeypatch,
):
    monkeypatch.setattr(
        "pipetransformer.recovery.retrying.records.record_loss", lambda *_: None
    )
    # Every rank lives, and yet each operation fails.
    failure = PeerFailure(None, "all_reduce", reason="sizes differ")
    plane = plane_of(failure=failure)
    plane.check.side_effect = failure
    plane.survive.side_effect = lambda standing: dict.fromkeys((0, 1), standing)
    run = make_run(
        config=Config(autodp=AutoDPConfig(on_peer_failure="continue")),
        plane=plane,
        plan_epoch=1,
    )
    run.state.become(Integrity.WHOLE)
    recovery = stand_in(Resumption, open_pass=stand_in(OpenPass, due_at=None))
    recovery.open_pass.report.return_value = 0, {}
    recovery.go_on.side_effect = lambda *_: {}
    changes = stand_in(Changes)
    survivors = RetriedCalls(run, make_role(run), changes, recovery)
    with pytest.raises(PeerFailure, match="sizes differ"):
        survivors.call("step", lambda: None)
    assert recovery.go_on.call_count == 3


def test_a_rank_that_leaves_at_an_epoch_waits_until_the_others_are_through(monkeypatch):
    # They may lose a rank before they know of the COMMIT, and change the plan again.
    survivors = stand_in(RetriedCalls)
    monkeypatch.setattr(coordinator, "RetriedCalls", lambda *_: survivors)
    run = make_run(state=TrainingState(None, epoch=3), control_log=stand_in(ControlLog))
    made = Coordinator(run)
    made._role.replica = stand_in(Replica)

    def leave(name, body):
        made._role.replica = None
        return True

    survivors.call.side_effect = leave
    survivors.follow.return_value = {"kind": "epoch", "epoch": 3}
    assert made.begin_epoch(5) == 3
    assert not run.control_log.tell.called


class Store:
    """Keys of one process, for a script with one rank on either side."""

    def __init__(self, keys):
        self.keys = keys

    def own_key(self, key):
        return key

    def publish(self, key, value):
        self.keys[key] = value

    def wait(self, key, **_):
        return self.keys[key]


@pytest.mark.parametrize("kind", ["plan", "switch", "evaluate"])
def test_a_standby_forgets_a_plan_that_a_lost_lead_announced_to_nobody_else(kind):
    keys = {}
    lost, source, standby = (ControlLog(Store(keys)) for _ in range(3))
    lost.tell("epoch", lead=True)
    source.tell("epoch", lead=False)
    lost.tell(kind, lead=True)
    for _ in range(2):
        standby.follow("epoch", "evaluate", "plan", "switch")
    keys.clear()  # the survivors' generation begins without messages
    standby.step_back(source.position)
    # An operation is made again and tells the same; a plan may not be needed now.
    source.tell(kind if kind == "evaluate" else "pass_end", lead=True)
    source.tell("epoch", lead=True)
    left = source.position - standby.position
    told = [standby.follow("pass_end", "epoch")["kind"] for _ in range(left)]
    assert told == (["epoch"] if kind == "evaluate" else ["pass_end", "epoch"])


def counted(batches, due=(), *, loss=1.0):
    """Return what a rank with shares of 12 rows tells of the open segment."""

    def of(numbers):
        rows = 12 * len(numbers)
        sums = {"loss_sum": loss * rows, "weight": float(rows), "rows": rows}
        return {**sums, "batches": list(numbers)}

    counts = {**of(batches), "cache": {}, "due": of(due)}
    return RankReport(done=len(batches), segment=1, counts=counts)


def test_a_share_of_the_step_that_others_have_taken_counts():
    ahead = counted([0, 1])
    reports = {
        0: ahead,
        1: counted([0], due=[1], loss=2.0),  # in the optimizer's step
        2: counted([0], loss=9.0),  # still in backward: nobody knows its loss
        3: counted([0, 1], due=[2], loss=4.0),  # in the next one, which is repeated
        4: dataclasses.replace(ahead, segment=0),
        5: RankReport(done=0),
    }
    parts = alike(ahead, reports)
    assert [(p["loss_sum"], p["weight"], p["rows"]) for p in parts] == [
        (24.0, 24.0, 24),
        (48.0, 24.0, 24),
        (96.0, 24.0, 24),
    ]


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_counted_with_the_step_under_way_is_told_until_it_is_done(ends):
    counts = object.__new__(Counts)
    vars(counts).update(_pending=[], _unread=[], _ended=False, _began=None)
    vars(counts).update(_interval=None, _counted_at=-1)
    vars(counts).update(_state=types.SimpleNamespace(step=0))
    vars(counts).update(_rows=0, _loss_sum=0.0, _weight=0.0, _ids=[], _batches=[])
    batch = types.SimpleNamespace(index=7, ids=[3, 4])
    loss = StepLoss(torch.tensor(0.5), 0, 0, waits=True)
    counts.count(loss, 2.0, 2, batch, ends=ends)
    told = {"loss_sum": 1.0, "weight": 2.0, "rows": 2, "batches": [7]}
    none = {"loss_sum": 0, "weight": 0, "rows": 0, "batches": []}
    assert counts.due() == (told if ends else none)
    counts.settle()
    assert counts.due() == none
    assert counts.batches == ([7] if ends else [])
