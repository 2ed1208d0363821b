"""A rank dies between its start and the first plan, and the others hear of it.

The deadlines are far apart: who waits for more than a heartbeat runs into the test's.
"""

import dataclasses
import os
import signal
import time
from datetime import timedelta

import pytest
import torch

import pipetransformer as pt
from pipetransformer import planner
from pipetransformer.autodp import launch, meeting
from pipetransformer.engine import session
from pipetransformer.loop import coordinator
from pipetransformer.replica.replica import warm_up
from pipetransformer.transformation import attempts, rewire
from pipetransformer.transformation import phases as transformation
from tests.engine.scenario import QUICK, config, make_engine, schedule
from tests.support.ranks import Ranks
from tests.support.store_host import StoreHost
from tests.support.toy import ToySet

pytestmark = pytest.mark.distributed

RANKS, DEADLINE_S = 3, 40.0
PATIENT = dataclasses.replace(
    QUICK,
    heartbeat_interval=timedelta(seconds=0.5),
    heartbeat_timeout=timedelta(seconds=4),
    store_timeout=timedelta(seconds=120),
    protocol_timeout=timedelta(seconds=120),
)
LATE_S = 8.0  # what one rank comes late in the meeting

# step: who dies, and before which call; in the order of the steps.
STEPS = {
    "joined, while rank 2 is late": (1, meeting.Meeting, "_beat"),
    "joined, while rank 1 is late": (2, meeting.Meeting, "_beat"),
    "all have joined": (1, launch, "RunStore"),
    "connected": (1, session, "Run"),
    "comparing models": (1, session, "signature_lines"),
    "warming up": (1, session, "warm_up"),
    "warming up, while the others still do": (1, session, "build_group"),
    "profile, the lead": (0, planner, "profile"),
    "profile, another": (1, coordinator, "agree_on_profile"),
    "planning": (0, attempts, "propose"),
    "before PREPARE": (1, transformation, "PlanAgreement"),
    "building the group": (1, transformation, "_build"),
    "move": (1, transformation, "move"),
    "comparing the replicas": (1, rewire, "compare_hashes"),
    "rewire": (1, transformation, "rewire"),
}
IN_COLLECTIVES = [STEPS[step] for step in ("move", "comparing the replicas", "rewire")]
# Here the others are opening their engines, too: all end under either policy.
OPENING = [
    step
    for step in [*STEPS][: [*STEPS].index("profile, the lead")]
    if step != "warming up"  # they have done so before they can know
]
SERVER = "joined and serves the store, while rank 2 is late"
ALL_STEPS = {**STEPS, SERVER: (0, meeting.Meeting, "_beat")}


def _stop_at(owner, name, number):
    """Make this process strike itself where it would call `name`."""
    inner, calls = getattr(owner, name), []

    def doomed(*args, **options):
        calls.append(name)
        if name == "_beat" and len(calls) < 4:
            return inner(*args, **options)  # the others have seen it
        return os.kill(os.getpid(), number)

    setattr(owner, name, doomed)


def _warm_up_late(group):
    """Warm up when another rank is known to be lost."""
    end = time.monotonic() + DEADLINE_S
    while group._plane.failure is None and time.monotonic() < end:
        time.sleep(0.01)
    warm_up(group)


def _train(rank, step, number, environment, settings):
    """Come to the first plan; the victim dies at the step, or stops there."""
    os.environ.update(environment)
    victim, owner, name = ALL_STEPS[step]
    if rank == victim:
        _stop_at(owner, name, number)
    if "still" in step and rank != victim:
        session.warm_up = _warm_up_late
    if f"while rank {rank} is late" in step:
        time.sleep(LATE_S)
    autodp = dataclasses.replace(PATIENT, **settings)
    settings = config(plan=pt.PlanConfig(num_stages=1, reshape="never"), autodp=autodp)
    engine = make_engine(freeze=schedule(0), dtype=torch.float64, config=settings)
    try:
        with engine:
            engine.prepare(ToySet(50, dtype=torch.float64), 12)
            for _ in engine.epochs(1):
                for batch in engine.batches(ToySet(50, dtype=torch.float64), 12):
                    engine.step(batch)
    except pt.PeerFailure as failure:
        return failure.rank, failure.phase, str(failure)
    return None


def _heard(step, number, environment, ranks_that_hear, **settings):
    arguments = step, number, environment, settings
    with Ranks(_train, RANKS, *arguments, timeout_s=DEADLINE_S) as ranks:
        outcomes = ranks.outcomes(ranks_that_hear)
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
        assert value is not None, f"rank {rank} has not heard of it"
    return [value for _, value in outcomes.values()]


@pytest.mark.parametrize(
    ("step", "policy"),
    [(step, "raise") for step in STEPS] + [(s, "continue") for s in OPENING],
)
def test_a_rank_that_dies_before_the_first_plan_is_missed_within_its_heartbeat(
    step, policy
):
    victim = STEPS[step][0]
    others = [rank for rank in range(RANKS) if rank != victim]
    with StoreHost() as host:
        heard = _heard(
            step, signal.SIGKILL, host.environment, others, on_peer_failure=policy
        )
    for rank, phase, text in heard:
        if phase in ("connect", "heartbeat"):
            assert rank == victim, text
        else:  # in a collective a broken connection may be all that is known
            assert "a peer is gone" in text and STEPS[step] in IN_COLLECTIVES, text


# Who comes after that finds no store, as where rank 0 has never started.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_the_server_is_heard_by_ranks_that_have_joined(number):
    patience = timedelta(seconds=2 * LATE_S + 8)  # half of it for a store that stalls
    (heard,) = _heard(SERVER, number, {}, [1], store_timeout=patience)
    assert heard[:2] == (0, "connect"), heard
