from datetime import timedelta

import pytest

from pipetransformer.autodp import PeerFailure, PlanAgreement, announced_epoch
from tests.autodp.world import joined, run_scenarios


def _alone(plane, epoch, **options):
    return PlanAgreement(plane, epoch, writer=True, participants=[0], **options)


def _commit(plane, epoch):
    transition = _alone(plane, epoch)
    transition.announce(b"plan")
    assert transition.meet()
    transition.acknowledge()
    assert transition.decide()
    return transition


def test_transition_alone_commits():
    with joined() as plane:
        assert announced_epoch(plane) == -1
        transition = _alone(plane, 1)
        transition.announce(b"plan")
        assert transition.receive() == b"plan"
        assert transition.meet()
        transition.acknowledge()
        assert transition.decide() is True
        assert transition.reason == ""
        assert transition.missing == transition.refused == []
        assert announced_epoch(plane) == 1


def test_transition_refuses_an_epoch_at_or_below_the_head():
    with joined() as plane:
        _alone(plane, 3).announce(b"")
        for epoch in (2, 3):
            with pytest.raises(RuntimeError, match="expected one above the head 3"):
                _alone(plane, epoch).announce(b"")
        with pytest.raises(ValueError, match="epoch: expected a number from 0"):
            _alone(plane, -1)
        with pytest.raises(ValueError, match="participants: expected distinct ranks"):
            PlanAgreement(plane, 4, writer=True, participants=[0, 0])


def test_transition_refuses_steps_in_another_order():
    with joined() as plane:
        transition = _alone(plane, 1)
        for step in (transition.receive, transition.meet, transition.decide):
            with pytest.raises(RuntimeError, match="expected an earlier step"):
                step()
        transition.announce(b"plan")
        transition.acknowledge()
        with pytest.raises(RuntimeError, match="before 'acknowledge'"):
            transition.acknowledge()


def test_transition_keeps_the_keys_of_few_epochs():
    with joined() as plane:
        epochs = [1, 2, 3, 4, 5, 9, 10]  # numbers may be left out
        for epoch in epochs:
            _commit(plane, epoch)
        for kind in ("plan/{}", "decision/{}", "ack/{}/0", "here/{}/0"):
            kept = [e for e in epochs if plane.read(kind.format(e)) is not None]
            assert kept == [9, 10]


def test_transition_that_nobody_decided_is_closed_by_the_next():
    with joined() as plane:
        given_up = _alone(plane, 1)
        given_up.announce(b"plan")
        _commit(plane, 2)
        given_up.acknowledge()
        assert not given_up.decide()
        assert given_up.reason == "superseded by plan epoch 2"


def test_transition_of_a_rank_that_slept_for_three_changes_is_fenced():
    with joined() as plane:
        sleeper = _alone(plane, 1)
        sleeper.announce(b"plan")
        for epoch in (2, 3, 4):
            _commit(plane, epoch)
        sleeper.acknowledge()
        with pytest.raises(PeerFailure, match="phase 'fenced', plan epoch 1"):
            sleeper.decide()
        assert plane.read("ack/1/0") is None
        assert plane.read("decision/1") is None
        late = PlanAgreement(plane, 1, writer=False, participants=[0])
        with pytest.raises(PeerFailure, match="without this one"):
            late.receive()


@pytest.mark.parametrize("removed", [["decision/2"], ["decision/2", "head"]])
@pytest.mark.parametrize("later", range(3))
def test_a_decision_that_no_rank_removed_is_a_loss_of_the_store(removed, later):
    with pytest.raises(PeerFailure, match="expected a key that stays") as caught:  # noqa: SIM117
        with joined() as plane:
            _commit(plane, 1)
            transition = _alone(plane, 2)
            transition.announce(b"plan")
            for epoch in range(3, 3 + later):
                _commit(plane, epoch)
            plane.delete(*removed)
            transition.acknowledge()
            transition.decide()
    failure = caught.value
    assert (failure.rank, failure.phase, failure.epoch) == (None, "store", 2)
    assert failure.reason.startswith("decision/2: ")


def test_plan_that_does_not_follow_the_one_in_force_is_refused():
    with joined() as plane:
        _commit(plane, 1)
        assert plane.plan_hash != ""
        _alone(plane, 2).announce(b"plan")
        in_force, plane.plan_hash = plane.plan_hash, "another"
        reader = PlanAgreement(plane, 2, writer=False, participants=[0])
        with pytest.raises(RuntimeError, match="expected the plan after 'another'"):
            reader.receive()
        assert b"expected the plan after 'another'" in plane.read("ack/2/0")
        plane.plan_hash = in_force


def test_receive_ends_at_its_deadline():
    with joined() as plane:
        transition = PlanAgreement(plane, 1, writer=False, participants=[0])
        with pytest.raises(PeerFailure, match="no rank published the plan of epoch 1"):
            transition.receive(timeout=timedelta(milliseconds=100))
        plane.close()


LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.5)


def _transition(plane, epoch, *, error=None, participants=None):
    writer = plane.rank == 1
    transition = PlanAgreement(
        plane, epoch, writer=writer, participants=participants or [0, 1, 2]
    )
    if writer:
        transition.announce(f"plan {epoch}".encode())
    assert transition.receive() == f"plan {epoch}".encode()
    if plane.rank not in transition.participants:
        assert not transition.meet()
    elif error is not None:
        transition.acknowledge(error)
    elif transition.meet():  # nobody has refused so far
        transition.acknowledge()
    decision = transition.decide()
    return decision, transition.reason, transition.missing, transition.refused


def _change_plans(plane):
    committed = _transition(plane, 1)
    refused = _transition(plane, 2, error="no memory" if plane.rank == 2 else None)
    fewer = _transition(plane, 3, participants=[1, 2])
    return committed, refused, fewer


def _rank_that_does_not_come(plane):
    # Only the writer's deadline is short, so only the writer gives up.
    writer = plane.rank == 1
    transition = PlanAgreement(
        plane,
        1,
        writer=writer,
        participants=[0, 1],
        timeout=SHORT if writer else LONG,
    )
    if writer:
        transition.announce(b"plan")
    if plane.rank == 0:
        plane.wait("gave up", phase="test", timeout=LONG)
    transition.receive()
    met = transition.meet()
    decision = transition.decide()
    if writer:
        plane.publish("gave up", b"")
    return met, decision, transition.reason, transition.missing


def _writer_without_a_word(plane):
    writer = plane.rank == 0
    transition = PlanAgreement(
        plane, 1, writer=writer, participants=[0, 1, 2], timeout=SHORT
    )
    if writer:
        transition.announce(b"plan")
    transition.receive()
    transition.acknowledge()
    if writer:
        plane.wait("gave up", phase="test", timeout=LONG)
    decision = transition.decide()
    if not writer:
        plane.publish("gave up", b"")
    return decision


@pytest.fixture(scope="module")
def results_of():
    return run_scenarios(
        [_change_plans, _rank_that_does_not_come, _writer_without_a_word], 3
    )


@pytest.mark.distributed
def test_transition_decides_alike_on_all_ranks(results_of):
    results = results_of(_change_plans)
    assert results[0] == results[1] == results[2]
    committed, refused, fewer = results[0]
    assert committed == fewer == (True, "", [], [])
    assert refused == (False, "rank 2: no memory", [], [2])


@pytest.mark.distributed
def test_transition_names_the_rank_that_did_not_come(results_of):
    results = results_of(_rank_that_does_not_come)
    reason = "ranks [0] did not acknowledge within 0.5 s"
    assert results == [(False, False, reason, [0])] * 3


@pytest.mark.distributed
def test_transition_aborts_without_its_slow_writer(results_of):
    assert results_of(_writer_without_a_word) == [False] * 3
