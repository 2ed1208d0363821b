"""What the tests of this room share: planes with short deadlines, and scenarios.

Starting a process costs more than most scenarios, so the scenarios of a file run
one after the other in one set of processes, each on a plane of its own.
"""

import contextlib
import time
import traceback
from dataclasses import replace
from datetime import timedelta

from torch.distributed import HashStore

from pipetransformer.autodp import AutoDPConfig, ControlPlane, LaunchInfo, connect
from tests.support.ranks import run_ranks

FAST = AutoDPConfig(
    heartbeat_interval=timedelta(seconds=0.2),
    heartbeat_timeout=timedelta(seconds=6),
    store_timeout=timedelta(seconds=30),
    protocol_timeout=timedelta(seconds=30),
)
SURVIVING = replace(FAST, on_peer_failure="continue")


@contextlib.contextmanager
def joined(config=FAST):
    """A plane that meets its peers at the end, or tells them why it does not."""
    info, store = connect(config)
    plane = ControlPlane(store, info, config)
    try:
        yield plane
        plane.finish()
    except BaseException as error:
        plane.fail("test", repr(error))
        raise
    finally:
        plane.close()


@contextlib.contextmanager
def planes_on_one_store(world_size, config=SURVIVING):
    """The planes of all ranks in this process, once each has beaten; their store."""
    store = HashStore()
    planes = [
        ControlPlane(
            store,
            LaunchInfo(rank, world_size, rank, world_size, 0, 1, "run", launched=True),
            config,
        )
        for rank in range(world_size)
    ]
    try:
        until(lambda: store.check([f"hb/{rank}" for rank in range(world_size)]))
        yield planes, store
    finally:
        for plane in planes:
            plane.close()


def until(condition, within_s=60):
    """Wait for what comes soon."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _run_all(rank, scenarios):
    results = {}
    for scenario in scenarios:
        try:
            with joined() as plane:
                results[scenario.__name__] = True, scenario(plane)
        except BaseException:
            results[scenario.__name__] = False, traceback.format_exc()
    return results


def run_scenarios(scenarios, world_size, timeout_s=100.0):
    """Run each ``scenario(plane)`` on all ranks.

    Returns a function from a scenario to its results by rank, which raises with the
    traceback of a rank that failed.
    """
    by_rank = run_ranks(_run_all, world_size, scenarios, timeout_s=timeout_s)

    def results_of(scenario):
        outcomes = [results[scenario.__name__] for results in by_rank]
        for rank, (ok, value) in enumerate(outcomes):
            assert ok, f"rank {rank} failed:\n{value}"
        return [value for _, value in outcomes]

    return results_of
