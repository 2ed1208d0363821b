import time
from datetime import timedelta

import pytest

from pipetransformer.autodp import Transition
from tests.autodp.world import joined, run_scenarios


def test_transition_alone_commits():
    with joined() as plane:
        transition = Transition(plane, 1, writer=True, participants=[0])
        transition.announce(b"plan")
        assert transition.receive() == b"plan"
        transition.acknowledge()
        assert transition.decide() is True
        assert transition.reason == ""


def test_transition_refuses_an_epoch_at_or_below_the_head():
    with joined() as plane:
        Transition(plane, 3, writer=True, participants=[0]).announce(b"")
        for epoch in (2, 3):
            late = Transition(plane, epoch, writer=True, participants=[0])
            with pytest.raises(RuntimeError, match="expected one above the head 3"):
                late.announce(b"")
        with pytest.raises(ValueError, match="epoch: expected a number from 0"):
            Transition(plane, -1, writer=True, participants=[0])
        with pytest.raises(ValueError, match="participants: expected distinct ranks"):
            Transition(plane, 4, writer=True, participants=[0, 0])


def test_transition_keeps_the_keys_of_few_epochs():
    with joined() as plane:
        for epoch in range(1, 8):
            transition = Transition(plane, epoch, writer=True, participants=[0])
            transition.announce(b"plan")
            transition.acknowledge()
            assert transition.decide()
        kept = [e for e in range(1, 8) if plane.read(f"plan/{e}") is not None]
        assert kept == [5, 6, 7]
        assert plane.read("decision/4") is None
        assert plane.read("ack/4/0") is None


def _transition(plane, epoch, error=None, timeout=None, silent=()):
    everyone = list(range(plane.world_size))
    transition = Transition(
        plane, epoch, writer=plane.rank == 1, participants=everyone, timeout=timeout
    )
    if plane.rank == 1:
        transition.announce(f"plan {epoch}".encode())
    assert transition.receive() == f"plan {epoch}".encode()
    if plane.rank not in silent:
        transition.acknowledge(error)
    return transition.decide(), transition.reason


def _change_plans(plane):
    rank = plane.rank
    committed = _transition(plane, 1)
    error = "out of memory" if rank == 2 else None
    refused = _transition(plane, 2, error)
    timeout = timedelta(seconds=0.5)
    missed = _transition(plane, 3, timeout=timeout, silent=[0])
    again = _transition(plane, 4)
    return committed, refused, missed, again


def _writer_without_a_word(plane):
    rank = plane.rank
    timeout = timedelta(seconds=0.5)
    transition = Transition(
        plane, 1, writer=rank == 0, participants=[0, 1, 2], timeout=timeout
    )
    if rank == 0:
        transition.announce(b"plan")
    transition.receive()
    transition.acknowledge()
    if rank == 0:
        time.sleep(1.5)
    return transition.decide()


@pytest.fixture(scope="module")
def results_of():
    return run_scenarios([_change_plans, _writer_without_a_word], 3)


@pytest.mark.distributed
def test_transition_decides_alike_on_all_ranks(results_of):
    results = results_of(_change_plans)
    assert results[0] == results[1] == results[2]
    committed, refused, missed, again = results[0]
    assert committed == again == (True, "")
    assert refused == (False, "rank 2: out of memory")
    assert missed == (False, "ranks [0] did not acknowledge within 0.5 s")


@pytest.mark.distributed
def test_transition_aborts_without_its_slow_writer(results_of):
    assert results_of(_writer_without_a_word) == [False] * 3
