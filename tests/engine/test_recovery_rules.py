"""What a recovery must not forget, each rule alone; no processes."""

import contextlib
import types

import pytest

from pipetransformer import changes as changes_module
from pipetransformer import pass_loop, placing
from pipetransformer.autodp import PeerFailure
from pipetransformer.changes import Changes
from pipetransformer.director import Director
from pipetransformer.layout import Layout
from pipetransformer.open_pass import OpenPass
from pipetransformer.operations import Operations
from pipetransformer.pass_loop import PassLoop
from pipetransformer.report.clock import Clock
from pipetransformer.script import ScriptLog
from pipetransformer.state import TrainingState
from pipetransformer.survivors import Survivors
from pipetransformer.transformation import Outcome


class Anything:
    """Takes any call, and remembers its name."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))

        return call


def outcome(*, committed, replica=None):
    proposal = types.SimpleNamespace(layout=Layout((0,), (0,)), position=None)
    return Outcome(committed, proposal, replica, {}, reason="" if committed else "no")


def recover(monkeypatch, result):
    """Return the run and the operations after a recovery at operation 7."""
    counters = types.SimpleNamespace(transformations_aborted=0)
    run = types.SimpleNamespace(
        plane=types.SimpleNamespace(members=(0, 1), outlive_store=lambda *_: None),
        history=types.SimpleNamespace(counters=counters),
        holds_state=True,
    )
    monkeypatch.setattr(changes_module, "prepare", lambda *_: None)
    monkeypatch.setattr(changes_module, "conclude", lambda *_: result)
    monkeypatch.setattr(changes_module.records, "learn", lambda *_: None)
    operations, role = Operations(), types.SimpleNamespace(replica=None, is_lead=True)
    operations.done, operations.result = 6, {"of": 6}
    Changes(run, role, operations).recover(3, None, 7, {"of": 7})
    return run, operations


def test_after_an_aborted_recovery_the_state_can_still_be_saved(monkeypatch):
    run, operations = recover(monkeypatch, outcome(committed=False))
    assert run.holds_state  # else nobody would write the emergency checkpoint
    assert operations.done == 6


def test_a_rank_that_catches_up_knows_the_result_it_may_have_to_pass_on(monkeypatch):
    _, operations = recover(monkeypatch, outcome(committed=True, replica=object()))
    assert (operations.done, operations.result) == (7, {"of": 7})


def test_a_pass_that_is_still_open_stays_in_its_epoch(monkeypatch):
    layout = Layout((0,), (0,))
    monkeypatch.setattr(placing, "placed", lambda *_: (object(), layout))
    state = TrainingState(None, step=10, epoch=1, batch=5, num_batches=5)
    run = types.SimpleNamespace(
        plan=object(),
        info=types.SimpleNamespace(world_size=2, rank=0),
        state=state,
        policy=types.SimpleNamespace(state_dict=dict),
        config=types.SimpleNamespace(seed=0),
        prices=types.SimpleNamespace(state=dict),
        cache_slots=0,
    )
    proposal = placing.propose_again(
        run, 2, able=(0,), whole=(0,), operations=9, position=None
    )
    assert (proposal.progress["epoch"], proposal.progress["batch"]) == (1, 5)
    # A checkpoint begins with the next epoch instead.
    assert (state.progress()["epoch"], state.progress()["batch"]) == (2, 0)


@pytest.mark.parametrize(("joins", "nodes"), [(False, 1), (True, 2)])
def test_a_rank_that_joins_the_first_batch_divides_the_pass_as_it_began(joins, nodes):
    state = TrainingState(None, pass_nodes=2)  # the other node was lost meanwhile
    run = types.SimpleNamespace(
        state=state,
        layout=Layout((0, 1), (0, 0)),
        info=types.SimpleNamespace(rank=1),
        config=types.SimpleNamespace(seed=0),
        current_pass=None,
    )
    open_pass = OpenPass(run, Anything(), Anything())
    loading = types.SimpleNamespace(
        dataset=range(8),
        batch_size=4,
        drop_last=False,
        min_rows=1,
        batches=lambda sampler: sampler,
    )
    open_pass.begin(loading, counts=not joins)
    sampler = open_pass.batches(0)
    assert (state.pass_nodes, sampler.num_nodes) == (nodes, nodes)


def loop(run, role, boundaries, open_pass):
    return PassLoop(run, role, boundaries, Anything(), open_pass, Anything())


def test_a_pass_that_a_recovery_has_brought_is_recorded_once(monkeypatch):
    monkeypatch.setattr(pass_loop, "epoch_line", str)
    run = types.SimpleNamespace(
        prices=Anything(),
        history=types.SimpleNamespace(epochs=[]),
        script=Anything(),
    )
    passes = loop(run, types.SimpleNamespace(is_lead=False), None, None)
    for epoch in (0, 0, 1):
        record = types.SimpleNamespace(
            epoch=epoch, pipeline_seconds_per_step=lambda: 1.0, predicted_step_ns=1
        )
        passes._record(record)
    assert [record.epoch for record in run.history.epochs] == [0, 1]


class Batches:
    """An open pass of three batches that a recovery takes from this rank."""

    def __init__(self):
        self.counted = None

    def begin(self, loading, *, counts):
        self.counted = object() if counts else None

    def open_segment(self):
        pass

    def drop(self):
        pass

    def batches(self, position):
        return (types.SimpleNamespace(index=n) for n in range(position, 3))


def test_a_rank_that_stands_by_since_its_last_batch_waits_for_the_passes_end():
    role = types.SimpleNamespace(stands_by=False, is_lead=False)
    role.replica = types.SimpleNamespace(prefix=None)
    role.active = lambda: role.replica
    clock = types.SimpleNamespace(
        each=lambda _, items: items, phase=lambda _: contextlib.nullcontext()
    )
    workload = types.SimpleNamespace(describe=lambda: dict(a=3, b=1, c=False))
    run = types.SimpleNamespace(
        state=TrainingState(None),
        clock=clock,
        workload=workload,
        freezer=Anything(),
        batch_in_hand=None,
    )
    loading = types.SimpleNamespace(dataset=range(3), batch_size=1, drop_last=False)
    boundaries = Anything()
    passes = loop(run, role, boundaries, Batches())
    for _ in passes.iterate(loading):
        role.stands_by, role.replica, passes._open.counted = True, None, None
        break  # the user's own, on every rank at this batch
    for _ in range(2):
        passes.finish()
    waits = [args for name, args, _ in boundaries.calls if name == "stand_by"]
    assert waits == [("pass end",)]


class Plane:
    """Every rank lives, and yet each operation fails."""

    members = (0, 1)
    failure = PeerFailure(None, "all_reduce", reason="sizes differ")

    def survive(self, standing):
        return dict.fromkeys(self.members, standing)

    def check(self):
        raise self.failure


def test_a_failure_that_no_lost_rank_explains_ends_the_run_after_some_attempts(
    monkeypatch,
):
    monkeypatch.setattr("pipetransformer.survivors.records", Anything())
    autodp = types.SimpleNamespace(on_peer_failure="continue")
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(autodp=autodp),
        clock=Clock(),
        info=types.SimpleNamespace(world_size=2, rank=0),
        layout=object(),
        plane=Plane(),
        state=TrainingState(None),
        holds_state=True,
        consistent=True,
        script=types.SimpleNamespace(position=0),
        plan_epoch=1,
        plan_hash="",
    )
    run.guarded = Plane().check
    role = types.SimpleNamespace(replica=object(), stands_by=False)
    recoveries = []
    recovery = types.SimpleNamespace(
        rest=lambda: None,
        go_on=lambda *_: recoveries.append(1) or {},
        open_pass=types.SimpleNamespace(
            standing=lambda: (0, {}), due_at=None, owed=False
        ),
    )
    survivors = Survivors(run, role, Operations(), Anything(), recovery)
    with pytest.raises(PeerFailure, match="sizes differ"):
        survivors.call("step", lambda: None)
    assert len(recoveries) == 3


def test_a_rank_that_leaves_at_an_epoch_waits_until_the_others_are_through():
    # They may lose a rank before they know of the COMMIT, and change the plan again.
    role = types.SimpleNamespace(stands_by=False, is_lead=False)

    def leave(name, body):
        role.stands_by = True
        return True

    survivors = types.SimpleNamespace(
        call=leave, follow=lambda *_, call: {"kind": "epoch", "epoch": 3}
    )
    director = Director.__new__(Director)
    director.run = types.SimpleNamespace(
        clock=types.SimpleNamespace(phase=lambda _: contextlib.nullcontext()),
        state=TrainingState(None, epoch=3),
        script=Anything(),
        layout=object(),
        config=types.SimpleNamespace(prepare_steps=0),
    )
    director._role, director._survivors = role, survivors
    assert director.begin_epoch(5) == 3
    assert director.run.script.calls == []


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
    lost, source, standby = (ScriptLog(Store(keys)) for _ in range(3))
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
