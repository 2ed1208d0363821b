"""Ranks are lost, and those that are left go on in the next generation."""

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch

from pipetransformer import _C
from pipetransformer.autodp import ControlPlane, PeerFailure, build_group, connect
from tests.autodp.world import FAST
from tests.support.ranks import Ranks
from tests.support.store_host import StoreHost

pytestmark = pytest.mark.distributed

SURVIVING = replace(
    FAST, on_peer_failure="continue", heartbeat_timeout=timedelta(seconds=5)
)


def _join(environment):
    os.environ.update(environment)
    info, store = connect(SURVIVING)
    return ControlPlane(store, info, SURVIVING)


def _reduce_until_failure(plane, group, at_step_3=None):
    """All-reduce until a failure ends it; returns the failure."""
    step = 0
    while True:
        if step == 3 and at_step_3 is not None:
            at_step_3()
        try:
            assert group.all_reduce_(torch.ones(2))[0] == group.size
        except PeerFailure as failure:
            return failure
        step += 1


def _regroup(plane, old):
    """What survivors do: agree, gather, a group of their own; returns it."""
    generation = plane.generation
    standings = plane.survive(f"standing of {plane.rank}".encode())
    assert standings == {rank: f"standing of {rank}".encode() for rank in standings}
    assert plane.generation == generation + 1
    assert plane.members == tuple(sorted(standings))
    assert plane.failure is None
    if old is not None:
        old.retire()
    values = plane.gather("again", str(plane.rank).encode(), phase="test")
    assert values == [str(rank).encode() for rank in plane.members]
    group = build_group(plane, name="g/0", members=plane.members)
    total = group.all_reduce_(torch.tensor([float(plane.rank)]))
    assert total.item() == sum(plane.members)
    return group


def _is_taken_apart(plane):
    """Whether a group goes at once, though one of the generation before is stuck."""
    before = len(os.listdir("/proc/self/fd"))
    group = build_group(plane, name="g/1", members=plane.members)
    group.barrier()
    assert len(os.listdir("/proc/self/fd")) > before
    group.retire()
    end = time.monotonic() + 40  # the stuck one's timeout is ten minutes
    while len(os.listdir("/proc/self/fd")) > before:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _kill_me(number):
    return lambda: os.kill(os.getpid(), number)


def _one_dies_and_one_sleeps(rank, environment):
    """Of four ranks in a group 2 is killed; then 3 is stopped and woken too late."""
    plane = _join(environment)
    pids = plane.gather("pids", str(os.getpid()).encode(), phase="test")
    group = build_group(plane, name="g/0", members=plane.members)
    plane.publish("run-wide", b"stays")
    _reduce_until_failure(plane, group, _kill_me(signal.SIGKILL) if rank == 2 else None)
    group = _regroup(plane, group)
    after_kill = plane.members
    failure = _reduce_until_failure(
        plane, group, _kill_me(signal.SIGSTOP) if rank == 3 else None
    )
    try:
        group = _regroup(plane, group)
    except PeerFailure as fenced:
        with pytest.raises(PeerFailure):
            plane.publish("run-wide", b"changed")
        plane.close()
        return after_kill, failure.phase, fenced.phase
    assert _is_taken_apart(plane)
    group.barrier()
    if rank == 1:
        os.kill(int(pids[3]), signal.SIGCONT)
    # Long enough for the one that woke up to do harm.
    for _ in range(20):
        group.all_reduce_(torch.ones(1))
        time.sleep(0.05)
    assert plane.read("run-wide") == b"stays"
    group.barrier()
    group.retire()
    plane.finish()
    return after_kill, failure.phase, plane.members


def test_survivors_of_a_kill_and_of_a_stop_go_on_and_the_sleeper_is_fenced():
    with (
        StoreHost() as host,
        Ranks(_one_dies_and_one_sleeps, 4, host.environment, timeout_s=110) as ranks,
    ):
        outcomes = ranks.outcomes([0, 1, 3])
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
    assert {value[0] for _, value in outcomes.values()} == {(0, 1, 3)}
    assert {outcomes[rank][1][2] for rank in (0, 1)} == {(0, 1)}
    assert outcomes[3][1][2] == "fenced"


def _lose_all_but_one(rank, environment):
    """3 fails by its own error, 2 dies within the rendezvous, 1 gets SIGTERM."""
    plane = _join(environment)
    with plane.termination():
        group = build_group(plane, name="g/0", members=plane.members)
        if rank == 3:
            plane.fail("user code", "KeyError: 'x'")
            with pytest.raises(PeerFailure, match="KeyError"):
                plane.survive(b"")
            plane.close()
            return None
        first = _reduce_until_failure(plane, group)
        if rank == 2:
            plane.survive(b"standing of 2")
            os._exit(0)
        with pytest.raises(PeerFailure):
            _regroup(plane, group)  # 2 is a member, and gone
        second = plane.failure
        group = _regroup(plane, None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        third = _reduce_until_failure(plane, group)
        if rank == 1:
            with pytest.raises(PeerFailure, match="SIGTERM"):
                plane.survive(b"")
            plane.close()
            return None
        _regroup(plane, group).retire()
        plane.finish()
    return first.reason, second.rank, third.phase, plane.members, plane.generation


def test_failures_one_after_the_other_leave_one_rank_that_goes_on():
    with (
        StoreHost() as host,
        Ranks(_lose_all_but_one, 4, host.environment, timeout_s=110) as ranks,
    ):
        outcomes = ranks.outcomes([0, 1, 3])
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
    reason, second, third, members, generation = outcomes[0][1]
    assert (reason, second) == ("KeyError: 'x'", 2)
    # The broken connection may be noticed, and confirmed, before the account.
    assert third in ("SIGTERM", "all_reduce")
    assert (members, generation) == ((0,), 3)


def _second_failure_comes_first(rank, environment):
    """The next generation fails before this rank has entered it."""
    plane = _join(environment)
    plane.fail("test", "the first", rank=-1)
    advance = _C.autodp.ControlPlane.advance

    def late(core, members):
        advance(core, members)
        if rank == 1:
            core.fail(_C.autodp.Failure(None, "test", reason="the second"))

    with mock.patch.object(_C.autodp.ControlPlane, "advance", late):
        first = plane.survive(b"")
    while plane.failure is None:  # rank 0 hears of it
        time.sleep(0.01)
    second = plane.survive(b"")
    plane.finish()
    return sorted(first), plane.generation, sorted(second)


def test_a_generation_that_fails_at_once_ends_no_survivor():
    with (
        StoreHost() as host,
        Ranks(_second_failure_comes_first, 2, host.environment, timeout_s=60) as ranks,
    ):
        assert ranks.join() == [([0, 1], 2, [0, 1])] * 2


def _resources():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _settled():
    """Resources once background threads have caught up."""
    seen = []
    for _ in range(50):
        time.sleep(0.02)
        seen.append(_resources())
    return tuple(map(min, zip(*seen, strict=True)))


def _many_generations(rank):
    plane = _join({})
    group, before = None, None
    for number in range(20):
        group = build_group(plane, name="g/0", members=plane.members)
        group.barrier()
        if number == 4:
            before = _settled(), plane.store.num_keys()
            group.barrier()
        if rank == 0:
            # Nobody's death: as a deadline that passed.
            plane.fail("test", f"round {number}", rank=-1)
        _reduce_until_failure(plane, group)
        plane.survive(b"")
        group.retire()
    plane.gather("done", b"", phase="test")
    after = _settled(), plane.store.num_keys()
    members = plane.members
    plane.gather("counted", b"", phase="test")
    plane.finish()
    return before, after, members


def test_twenty_generations_leave_no_thread_descriptor_or_pile_of_keys():
    with Ranks(_many_generations, 2, timeout_s=110) as ranks:
        for before, after, members in ranks.join():
            assert members == (0, 1)
            (descriptors, threads), keys = before
            (descriptors_after, threads_after), keys_after = after
            assert descriptors_after <= descriptors
            assert threads_after <= threads
            assert keys_after - keys < 15 * 20, "per generation"
