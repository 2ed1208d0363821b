"""The store is lost: ranks that outlive it train on, the others end."""

import os
import signal
import time

import pytest
import torch

from pipetransformer.autodp import PeerFailure, build_group
from tests.autodp.test_survivors import _join, _reduce_until_failure
from tests.support.ranks import Ranks
from tests.support.store_host import StoreHost

pytestmark = pytest.mark.distributed


def _reduce_until_all_lost_it(plane, group):
    """All-reduce until every member does without the store."""
    while True:
        lost = group.all_reduce_(torch.tensor([float(plane.store_lost)]))
        if lost.item() == group.size:
            return
        time.sleep(0.02)


def _stopped_for_a_while(rank, environment, host_pid):
    """The store stops for longer than ranks wait for it, and comes back."""
    plane = _join(environment)
    plane.outlive_store(True)
    group = build_group(plane, name="g/0", members=plane.members)
    group.barrier()
    time.sleep(1.0)  # until all beat: before that, silence counts as a slow start
    if rank == 0:
        os.kill(host_pid, signal.SIGSTOP)
    _reduce_until_all_lost_it(plane, group)
    if rank == 0:
        os.kill(host_pid, signal.SIGCONT)
    for _ in range(40):
        group.all_reduce_(torch.ones(1))
        time.sleep(0.05)
    failure = plane.failure
    group.barrier()
    group.retire()
    plane.finish()
    return failure


def _killed(rank, environment, host_pid):
    """The store is killed: 0 and 1 are active, 2 stands by."""
    plane = _join(environment)
    if rank == 2:
        with pytest.raises(PeerFailure) as caught:
            plane.publish("standby", b"waits")
            plane.wait("never", phase="test")
        with pytest.raises(PeerFailure, match="store"):
            plane.survive(b"")
        plane.close()
        return caught.value.phase
    plane.outlive_store(True)
    group = build_group(plane, name="g/0", members=[0, 1])
    plane.wait("standby", phase="test")
    group.barrier()
    if rank == 0:
        os.kill(host_pid, signal.SIGKILL)
    _reduce_until_all_lost_it(plane, group)
    with pytest.raises(PeerFailure, match="phase 'store'"):
        plane.publish("key", b"")
    assert plane.failure is None, "an operation on keys fails alone"
    group.barrier()
    if rank == 1:
        group.retire()
        plane.finish()
        return "finished"
    failure = _reduce_until_failure(plane, group)  # 1 is gone: nobody tells more
    with pytest.raises(PeerFailure):
        plane.survive(b"")
    plane.close()
    return failure.phase


def _lose_two_stores(rank, stopped, killed):
    return _stopped_for_a_while(rank, *stopped), _killed(rank, *killed)


@pytest.fixture(scope="module")
def outcomes():
    with StoreHost() as first, StoreHost() as second:
        arguments = [(host.environment, host.pid) for host in (first, second)]
        with Ranks(_lose_two_stores, 3, *arguments, timeout_s=110) as ranks:
            return ranks.join()


def test_store_that_stops_and_comes_back_ends_nobody(outcomes):
    assert [failure for failure, _ in outcomes] == [None] * 3


def test_active_ranks_outlive_the_store_and_standbys_end(outcomes):
    first, second, standby = [phase for _, phase in outcomes]
    assert first == "all_reduce"
    assert second == "finished"
    assert standby == "store"
