import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from pipetransformer.autodp import AutoDPConfig, ControlPlane, PeerFailure, connect
from tests.autodp.world import FAST, joined, run_scenarios
from tests.support.default_group import default_group
from tests.support.ranks import run_ranks


def test_plane_alone_keeps_what_is_published():
    with joined() as plane:
        assert plane.read("key") is None
        plane.publish("key", b"\0value")
        assert plane.read("key") == b"\0value"
        assert plane.wait("key", phase="test") == b"\0value"
        assert plane.gather("all", b"x", phase="test") == [b"x"]
        plane.delete("key", "absent")
        assert plane.read("key") is None


def test_compare_set_lets_the_first_writer_win():
    with joined() as plane:
        assert plane.compare_set("key", b"", b"first") == b"first"
        assert plane.compare_set("key", b"", b"second") == b"first"
        assert plane.compare_set("key", b"first", b"third") == b"third"


def test_wait_deadline_fails_the_run_with_phase_and_deadline():
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    with pytest.raises(
        PeerFailure, match=r"phase 'resume', deadline 0.2 s: no rank published 'key'"
    ):
        plane.wait("key", phase="resume", timeout=timedelta(seconds=0.2))
    with pytest.raises(PeerFailure, match="resume"):
        plane.publish("key", b"")
    plane.close()
    plane.close()


def test_wait_any_returns_the_complete_group():
    with joined() as plane:
        assert plane.wait_any([["a"]], timeout=timedelta(seconds=0.05)) is None
        plane.publish("b", b"")
        assert plane.wait_any([["a"], ["b", "a"]], timeout=timedelta(0)) is None
        assert plane.wait_any([["a"], ["b"]]) == 1


def test_operations_of_the_store_are_counted():
    with joined() as plane:
        before = plane.num_store_operations
        plane.publish("a", b"")
        plane.read("a")
        plane.compare_set("b", b"", b"x")
        plane.delete("a", "b")
        plane.delete_later("a")
        assert plane.num_store_operations == before + 5
        plane.wait_any([["a"]], timeout=timedelta(seconds=0.1))
        assert plane.num_store_operations > before + 6  # a wait looks several times
    ended = plane.num_store_operations
    plane.delete_later("a")
    assert plane.num_store_operations == ended


def test_failure_of_a_run_is_the_first_one():
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    plane.set_epoch(7)
    plane.fail("user code", "KeyError:\n'x'")
    plane.fail("later", "something else")
    assert str(plane.failure) == (
        "peer failure: rank 0, phase 'user code', plan epoch 7: KeyError: 'x'"
    )
    with pytest.raises(PeerFailure), plane.guard():
        raise RuntimeError("what autograd makes of it")
    plane.close()


def test_guard_leaves_errors_alone_while_the_run_lives():
    with joined() as plane, pytest.raises(KeyError), plane.guard():
        raise KeyError("x")


def test_failure_crosses_process_boundaries_whole():
    import pickle

    failure = PeerFailure(2, "heartbeat", epoch=3, deadline_s=10.0, reason="none")
    copy = pickle.loads(pickle.dumps(failure))
    assert str(copy) == str(failure)
    assert (copy.rank, copy.phase, copy.epoch, copy.deadline_s, copy.reason) == (
        2,
        "heartbeat",
        3,
        10.0,
        "none",
    )
    assert str(failure) == (
        "peer failure: rank 2, phase 'heartbeat', plan epoch 3, deadline 10.0 s: none"
    )


@pytest.fixture
def hangup():
    """Takes the action of SIGHUP to begin with; what the tests run under may be any."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda action: signal.signal(signal.SIGHUP, action)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_wakes_a_blocked_wait(number, hangup):
    hangup(signal.SIG_DFL)
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    before = signal.getsignal(number)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    with plane.termination():
        timer.start()
        with pytest.raises(PeerFailure, match=f"phase '{number.name}'"):
            plane.wait("never", phase="test", timeout=timedelta(seconds=30))
    assert signal.getsignal(number) is before
    plane.close()


def test_a_sighup_that_is_ignored_or_handled_ends_no_run(hangup):
    seen = []
    for action in (signal.SIG_IGN, lambda number, frame: seen.append(number)):
        hangup(action)
        with joined() as plane, plane.termination():
            assert signal.getsignal(signal.SIGHUP) is action
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert plane.failure is None
    assert seen == [signal.SIGHUP]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_of_a_forked_worker_is_not_the_parents(number, hangup):
    hangup(signal.SIG_DFL)
    with joined() as plane, plane.termination():
        ready, set_ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(set_ready, b"1")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, number)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == number
        time.sleep(0.2)
        assert plane.failure is None


def test_plane_in_a_forked_child_is_inert():
    with joined() as plane:
        child = os.fork()
        if child == 0:
            plane.close()
            del plane
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        plane.publish("still", b"alive")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"group_timeout": timedelta(0)}, "group_timeout: expected at least a mil"),
        (
            {"heartbeat_timeout": timedelta(seconds=2)},
            "heartbeat_timeout: expected at least three heartbeat intervals",
        ),
        ({"transfer_bucket_bytes": 0}, "transfer_bucket_bytes: expected a number"),
        ({"on_peer_failure": "retry"}, "on_peer_failure: expected one of 'raise', 'c"),
    ],
)
def test_config_names_the_bad_setting(settings, text):
    with pytest.raises(ValueError, match=text):
        AutoDPConfig(**settings)


def test_duration_of_another_type_is_named():
    with pytest.raises(TypeError, match="group_timeout: expected a timedelta, got 3"):
        AutoDPConfig(group_timeout=3)


def fail_under_raise(_rank):
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    plane.gather("here", b"", phase="test")
    with pytest.raises(RuntimeError, match="expected a failed generation, got gen"):
        plane.survive(b"")
    plane.gather("tried", b"", phase="test")
    plane.fail("test", "nobody's fault", rank=-1)
    with pytest.raises(PeerFailure, match="nobody's fault"):
        plane.survive(b"")
    plane.close()


@pytest.mark.distributed
def test_plane_under_raise_does_not_survive():
    run_ranks(fail_under_raise, 2, timeout_s=60)


def test_a_plane_that_is_alone_survives_what_loses_nobody():
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    plane.fail("test", "nobody's fault", rank=-1)
    assert plane.survive(b"mine") == {0: b"mine"}
    plane.check()
    plane.fail("test", "my own", rank=0)
    with pytest.raises(PeerFailure, match="my own"):
        plane.survive(b"")
    plane.close()


def _talk(plane):
    values = plane.gather("hello", str(plane.rank).encode(), phase="test")
    if plane.rank == 0:
        time.sleep(0.3)
        plane.publish("late", b"news")
    assert plane.wait("late", phase="test") == b"news"
    return values, plane.info.run_id


def _talk_again(plane):
    return _talk(plane)


def _talk_over_users_store(rank):
    with default_group(rank, 2):  # left alone: its ranks meet at its end
        with joined() as plane:
            return plane.info.store_rank, plane.gather("hello", b"", phase="test")


@pytest.mark.distributed
def test_plane_uses_the_store_of_the_users_group():
    assert run_ranks(_talk_over_users_store, 2) == [(None, [b"", b""])] * 2


@pytest.mark.distributed
def test_runs_of_one_process_exchange_values_and_have_names_of_their_own():
    results_of = run_scenarios([_talk, _talk_again], 3)
    run_ids = set()
    for scenario in (_talk, _talk_again):
        results = results_of(scenario)
        assert [values for values, _ in results] == [[b"0", b"1", b"2"]] * 3
        run_ids |= {run_id for _, run_id in results}
    assert len(run_ids) == 2
