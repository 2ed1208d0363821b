"""Where the system gives no more threads a rank gets an error, and never dies of it."""

import os
import resource
import threading
import time
from dataclasses import replace

import pytest

from pipetransformer.autodp import ControlPlane, build_group, connect
from pipetransformer.pipe import Workers
from tests.autodp.world import FAST
from tests.support.lifeline import die_with
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="root alone can become a user with no other process"
    ),
]


def num_threads():
    return len(os.listdir("/proc/self/task"))


def allow(more):
    """Let the user of this process have `more` threads than there are."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (num_threads() + more, hard))


def become_a_stranger():
    """Become a user that has no other process; tell whether limits hold for it."""
    user = 1_900_000_000 + os.getpid()
    os.setresuid(user, user, user)
    die_with(os.getppid())  # forgotten with the old user
    allow(0)
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return True
    return False


def settled(count):
    """Wait until this process has so many threads; return how many it has."""
    end = time.monotonic() + 20
    while num_threads() != count and time.monotonic() < end:
        time.sleep(0.01)
    return num_threads()


def make_with_fewer_and_fewer(rank):
    if not become_a_stranger():
        return None
    before, said = num_threads(), []
    for more in range(5):
        allow(100)
        info, store = connect(FAST)
        allow(more)
        try:
            plane = ControlPlane(store, info, FAST)
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append("made")
            plane.close()
        said.append(settled(before) - before)
    allow(2)
    try:
        Workers(3)
    except RuntimeError as error:
        said.append(str(error))
    said.append(settled(before) - before)
    return said


def test_a_plane_or_pool_that_gets_too_few_threads_leaves_none_behind():
    (said,) = run_ranks(make_with_fewer_and_fewer, 1)
    if said is None:
        pytest.skip("this system limits nobody's threads")
    names = ["pt-store", "pt-heartbeat", "pt-monitor", "pt-retire"]
    for name in names:
        text, left = said.pop(0), said.pop(0)
        assert text.startswith(f"thread {name}: expected the system to give one more")
        assert left == 0, name
    assert said[:2] == ["made", 0]
    assert said[2].startswith("workers: expected the system to give 3 threads, got 2")
    assert said[3] == 0


def retire_with_none(rank):
    """Take groups apart in the three places that want a thread of their own."""
    config = replace(FAST, on_peer_failure="continue")
    info, store = connect(config)
    plane = ControlPlane(store, info, config)
    first = build_group(plane, name="g/0", members=[0, 1])
    if not become_a_stranger():
        return None
    plane.fail("test", "the end of a generation", rank=1 - rank)
    allow(0)
    with pytest.raises(RuntimeError, match="thread pt-retire: expected the system"):
        plane.core.advance([0, 1])
    said = [plane.generation]
    allow(1000)
    plane.core.advance([0, 1])
    said.append(plane.generation)
    second = build_group(plane, name="g/1", members=[0, 1])
    second.barrier()
    plane.close()
    allow(0)
    first.retire()  # of an earlier generation
    second.retire()  # of a closed plane
    said.append("lives")
    return said


def test_a_group_is_taken_apart_where_no_thread_is_left_for_it():
    outcomes = run_ranks(retire_with_none, 2)
    if None in outcomes:
        pytest.skip("this system limits nobody's threads")
    assert outcomes == [[0, 1, "lives"]] * 2
