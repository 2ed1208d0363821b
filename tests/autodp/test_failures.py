"""A rank dies, stops or is told to end: every other one gets one PeerFailure."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.autodp import ControlPlane, PeerFailure, build_group, connect
from tests.autodp.world import FAST, joined
from tests.support.ranks import Ranks, free_port, run_ranks

pytestmark = pytest.mark.distributed

GENEROUS_S = 60


def _outcome_of(plane, body):
    """(rank, phase) of the failure that ends `body`, and how long closing took."""
    try:
        with plane.guard():
            body()
    except PeerFailure as failure:
        plane.close()
        return failure.rank, failure.phase, str(failure)
    finally:
        plane.close()
    return None


def _train(plane, group, victim, number):
    model = DistributedDataParallel(
        nn.Linear(4, 1), process_group=group.process_group, init_sync=False
    )
    for step in range(10**6):
        if plane.rank == victim and step == 3:
            os.kill(os.getpid(), number)
        model(torch.ones(2, 4)).sum().backward()


def _lose_a_rank(rank, victim, number):
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    partner = 1  # always alive, and in a collective with the victim
    plane.gather("start", b"", phase="start")
    if rank in (victim, partner):
        group = build_group(plane, name="g/0", members=sorted([victim, partner]))
        plane.wait("stands by", phase="start")  # the third one has left the gathering
        return _outcome_of(plane, lambda: _train(plane, group, victim, number))

    def stand_by():
        plane.publish("stands by", b"")
        plane.wait("never", phase="standby")

    return _outcome_of(plane, stand_by)


def _survivors(ranks, victim):
    """Outcomes of all but `victim`, who must also leave their process in peace."""
    try:
        survivors = [r for r in range(len(ranks.processes)) if r != victim]
        outcomes = ranks.outcomes(survivors)
        for rank in survivors:
            ranks.processes[rank].join(timeout=GENEROUS_S)
            assert ranks.processes[rank].exitcode == 0, f"rank {rank} did not exit"
        for rank, (ok, value) in outcomes.items():
            assert ok, f"rank {rank} failed:\n{value}"
        return {rank: value for rank, (_, value) in outcomes.items()}
    finally:
        ranks.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 2])
def test_lost_rank_ends_backward_and_standby_of_all_others(victim, number):
    ranks = Ranks(_lose_a_rank, 3, victim, number)
    outcomes = _survivors(ranks, victim)
    for failed_rank, phase, text in outcomes.values():
        assert phase in ("all_reduce", "broadcast", "heartbeat", "store"), text
        assert failed_rank in (None, victim), text
        assert "/pytorch/" not in text, "a bare backend message"


# A rank that dies before its first beat is found by the deadline of a start, which a
# build must outlive.
PATIENT = replace(
    FAST, store_timeout=timedelta(seconds=30), protocol_timeout=timedelta(seconds=80)
)


def _dies_unnoticed(rank):
    info, store = connect(PATIENT)
    plane = ControlPlane(store, info, PATIENT)
    plane.gather("start", b"", phase="start")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:  # connects a group with the dead one
        members = [0, 1]
        return _outcome_of(
            plane, lambda: build_group(plane, name="g/0", members=members)
        )

    def compute():
        while True:
            plane.check()
            time.sleep(0.01)

    return _outcome_of(plane, compute)


def test_dead_rank_is_found_by_its_heartbeat_while_others_build_or_compute():
    outcomes = _survivors(Ranks(_dies_unnoticed, 3), 1)
    text = "peer failure: rank 1, phase 'heartbeat', deadline 6.0 s: no heartbeat"
    assert set(outcomes.values()) == {(1, "heartbeat", text)}


def _told_to_end(rank):
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    if rank == 2:  # stands by
        return _outcome_of(plane, lambda: plane.wait("never", phase="standby"))
    group = build_group(plane, name="g/0", members=[0, 1])
    if rank == 0:  # never joins the collective
        return _outcome_of(plane, lambda: plane.wait("never", phase="standby"))
    with plane.termination():
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        model = DistributedDataParallel(
            nn.Linear(4, 1), process_group=group.process_group, init_sync=False
        )
        return _outcome_of(plane, lambda: model(torch.ones(2, 4)).sum().backward())


def _user_error(rank):
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    if rank == 0:  # serves the store: its account must arrive before it goes
        plane.fail("user code", "KeyError: 'x'")
        plane.close()
        return None
    return _outcome_of(plane, lambda: plane.wait("never", phase="standby"))


def _fail_twice(rank):
    return _user_error(rank), _told_to_end(rank)


@pytest.fixture(scope="module")
def failed_twice():
    return Ranks(_fail_twice, 3).join()


def test_error_of_the_serving_rank_reaches_all_others(failed_twice):
    outcomes = [first for first, _ in failed_twice]
    text = "peer failure: rank 0, phase 'user code': KeyError: 'x'"
    assert outcomes == [None, (0, "user code", text), (0, "user code", text)]


def test_sigterm_ends_a_blocked_backward_and_all_others(failed_twice):
    outcomes = {second for _, second in failed_twice}
    assert len(outcomes) == 1
    assert outcomes.pop()[:2] == (1, "SIGTERM")


def test_store_that_nobody_serves_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    hurried = replace(FAST, store_timeout=timedelta(seconds=2))
    text = "phase 'connect', deadline 2.0 s: store: expected all 2 ranks at 127.0.0.1:"
    with pytest.raises(PeerFailure, match=text):
        connect(hurried)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("RANK", "x", "RANK: expected a number set by the launcher, got 'x'"),
        ("RANK", "2", "RANK: expected a number below WORLD_SIZE 2, got 2"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE: expected a number that divides"),
        ("LOCAL_WORLD_SIZE", "-1", r"LOCAL_WORLD_SIZE: .* as many .* each\), got -1"),
        ("LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE: .* divides WORLD_SIZE 2 .*got 3"),
        ("GROUP_RANK", "1", r"RANK: expected GROUP_RANK \* .*, which is 1 .*, got 0"),
        ("LOCAL_RANK", "1", r"RANK: expected GROUP_RANK \* .*, which is 1 .*, got 0"),
        ("MASTER_PORT", "65536", "MASTER_PORT: expected a port .* 65535, got 65536"),
        ("MASTER_PORT", "-1", "MASTER_PORT: expected a port from 1 to 65535, got -1"),
    ],
)
def test_launcher_variable_that_makes_no_sense_is_named(
    monkeypatch, variable, value, text
):
    sound = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, text_of_it in {**sound, variable: value}.items():
        monkeypatch.setenv(name, text_of_it)
    with pytest.raises(ValueError, match=text):
        connect(FAST)


def _reduces_after_the_end(rank):
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    group = build_group(plane, name="g/0", members=[0, 1])
    group.barrier()
    plane.finish()
    if rank == 1:
        os._exit(0)  # its connections break; nobody watches any more
    try:
        group.all_reduce_(torch.ones(3))
    except PeerFailure as failure:
        outcome = failure.phase
    group.retire()
    group.retire()
    return outcome


def test_collective_after_the_end_raises_when_its_peer_goes():
    ranks = Ranks(_reduces_after_the_end, 2)
    assert _survivors(ranks, 1) == {0: "all_reduce"}


SCRIPT = """
import os, pathlib, signal, sys
from tests.autodp.test_failures import _outcome_of
from tests.autodp.world import FAST, joined
from pipetransformer.autodp import ControlPlane, connect

info, store = connect(FAST)
plane = ControlPlane(store, info, FAST)
with plane.termination():
    plane.gather("start", b"", phase="start")
    if info.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = _outcome_of(plane, lambda: plane.wait("never", phase="standby"))
path = pathlib.Path(sys.argv[1], str(info.rank))
path.write_text(f"{info.store_rank} {outcome[1]}")
"""


def test_killed_rank_under_torchrun_ends_the_others(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=3",
            f"--master-port={free_port()}",
            str(script),
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode != 0
    for rank in (0, 1):
        served_by, phase = (tmp_path / str(rank)).read_text().split()
        assert served_by == "None", "torchrun serves the store"
        assert phase in ("SIGTERM", "heartbeat")


def _comes_late(rank):
    """Come to a barrier when the other one has waited for longer than it may."""
    with pytest.raises(PeerFailure) as caught, joined(HASTY) as plane:
        group = build_group(plane, name="g/0", members=[0, 1])
        if rank == 1:
            time.sleep(4)
        group.barrier()
    return str(caught.value)


HASTY = replace(FAST, group_timeout=timedelta(seconds=1))


@pytest.mark.distributed
def test_a_peer_that_is_busy_is_not_called_gone_alone():
    text = run_ranks(_comes_late, 2)[0]
    assert "has been busy with something else for longer than group_timeout" in text
