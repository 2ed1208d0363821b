"""What one rank's loss of the store, or failure, leaves on the store for the others.

Several planes live in this process, on one store: no process, nothing to wait for.
"""

from unittest import mock

import pytest

from pipetransformer.autodp import PeerFailure
from pipetransformer.autodp import rendezvous as rendezvous_module
from pipetransformer.run.control_log import ControlLog
from tests.autodp.world import FAST, SURVIVING, planes_on_one_store, until


def _value(store, key):
    """What a key holds; None, not a wait, where there is none."""
    return store.get(key) if store.check([key]) else None


def _break_connection(plane):
    """Let an operation on the store fail, as a broken connection would."""
    store = plane.core.group_store()
    store.set("text", "no number")
    with pytest.raises(RuntimeError):
        store.add("text", 1)


def test_a_standby_that_loses_its_connection_ends_alone():
    with planes_on_one_store(3) as (planes, store):
        for plane in planes[:2]:
            plane.outlive_store(True)
        _break_connection(planes[2])
        assert planes[2].failure.phase == "store"
        planes[2].close()
        assert not store.check(["gen/0/lost"])
        assert _value(store, "roll/1/2") == b"leaves"
        assert not any(plane.store_lost for plane in planes[:2])


def test_a_rank_that_goes_on_without_the_store_takes_all_along_and_fails_nobody():
    with planes_on_one_store(3) as (planes, store):
        for plane in planes[:2]:
            plane.outlive_store(True)
        _break_connection(planes[0])
        until(lambda: all(plane.store_lost for plane in planes))
        for plane in planes:
            plane.close()
        assert [plane.failure is None for plane in planes] == [True, True, False]
        assert planes[2].failure.phase == "store"
        # It would end the ranks that train on.
        assert not store.check(["gen/0/abort"])


def test_under_raise_a_rank_that_loses_its_connection_tells_all():
    with planes_on_one_store(2, FAST) as (planes, store):
        _break_connection(planes[0])
        until(lambda: store.check(["gen/0/abort"]))  # long before it closes
        assert b"the store is lost" in _value(store, "gen/0/abort")
        until(lambda: planes[1].failure is not None)
        assert planes[1].failure.phase == "store"


def test_generation_that_begins_without_the_store_is_born_failed():
    with planes_on_one_store(2) as (planes, _):
        plane = planes[0]
        plane.outlive_store(True)
        _break_connection(plane)
        plane.fail("test", "gone", rank=1)  # and the list was read before the loss
        plane.core.advance([0])
        assert plane.generation == 1
        assert plane.failure.phase == "store"


def test_what_outlived_the_store_in_one_generation_does_not_in_the_next():
    with planes_on_one_store(2) as (planes, _):
        plane = planes[0]
        plane.outlive_store(True)
        plane.fail("test", "gone", rank=1)
        assert sorted(plane.survive(b"")) == [0]
        _break_connection(plane)
        assert plane.failure.phase == "store"


def test_nobody_forms_a_generation_before_the_failure_is_on_the_store():
    with planes_on_one_store(2) as (planes, store):
        planes[0].fail("test", "suspected, but alive", rank=1)
        assert sorted(planes[0].survive(b"")) == [0]
        assert b"suspected, but alive" in _value(store, "gen/0/abort")
        with pytest.raises(PeerFailure, match="suspected"):
            planes[1].publish("run-wide", b"from the generation before")
        with pytest.raises(PeerFailure, match="without this one"):
            planes[1].survive(b"")


class _Clock:
    """Stands in for `time`: the job is stopped between any two looks."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1000.0
        return self.now

    def sleep(self, seconds):
        assert seconds > 0


class _Board:
    """A roll that others close after some looks."""

    silent = (1,)

    def __init__(self, looks):
        self.looks = looks
        self.deadline = False

    def step(self):
        self.looks -= 1
        return self.looks == 0

    def on_deadline(self):
        self.deadline = True


@pytest.mark.parametrize(("looks", "cut_off"), [(5, False), (100, True)])
def test_a_job_that_was_stopped_cuts_nobody_off_from_the_roll(
    monkeypatch, looks, cut_off
):
    monkeypatch.setattr(rendezvous_module, "time", _Clock())
    board = _Board(looks)
    core = mock.Mock(begin_rendezvous=lambda standing: board)
    rendezvous_module.meet_survivors(core, b"", SURVIVING)
    assert board.deadline == cut_off


def test_what_a_lost_lead_said_is_not_taken_for_the_next_one():
    with planes_on_one_store(2) as (planes, _):
        lead, standby = ControlLog(planes[1]), ControlLog(planes[0])
        lead.tell("plan", lead=True, plan_epoch=7)
        planes[0].fail("test", "gone", rank=1)
        planes[0].survive(b"")
        ControlLog(planes[0]).tell("epoch", lead=True)
        assert standby.follow("epoch", "plan") == {"kind": "epoch"}
