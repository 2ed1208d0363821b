"""Rank functions that lose a rank or the store; imported by test_survivors."""

import dataclasses
import os
import signal
import time
from datetime import timedelta

import torch

import pipetransformer as pt
from pipetransformer import transformation
from pipetransformer.open_pass import OpenPass
from tests.engine.scenario import (
    QUICK,
    config,
    is_active,
    make_engine,
    moments,
    schedule,
)
from tests.support.toy import ToySet

EPOCHS, BATCH = 3, 12
SURVIVING = dataclasses.replace(
    QUICK, on_peer_failure="continue", heartbeat_timeout=timedelta(seconds=5)
)
TWO_STAGES = {"num_stages": 2, "reshape": "never"}
ONE_STAGE = {"num_stages": 1, "reshape": "never"}
# Four stages as long as nothing is frozen, then one.
SHRINKING = {"slot_memory_bytes": 27_000, "reshape": "always"}

# case: (plan, freeze schedule, {rank: where it dies}); see `lose`.
# With two stages ranks 0 and 2 drive, 1 and 3 stand by.
CASES = {
    "member in a step": (TWO_STAGES, (0,), {2: ("step", 1, 2)}),
    "lead in a step": (TWO_STAGES, (0,), {0: ("step", 1, 3)}),
    "standby": (TWO_STAGES, (0,), {3: ("standby", 1)}),
    "in an evaluation": (ONE_STAGE, (0,), {2: ("evaluate", 1)}),
    "in an evaluation within a pass": (ONE_STAGE, (0,), {0: ("within", 1)}),
    "at the end of a pass": (ONE_STAGE, (0,), {1: ("close", 1)}),
    "one after the other": (
        ONE_STAGE,
        (0,),
        {1: ("step", 0, 1), 3: ("between", 1)},
    ),
    "member before the decision": (SHRINKING, (0, 6), {3: ("_prepare", 0)}),
    "new member in the move": (SHRINKING, (0, 6), {2: ("move", 0)}),
    "lead in the move": (ONE_STAGE, (0, 3), {0: ("move", 0)}),
    "new member in the move between two batches": (
        {**SHRINKING, "freeze_every": 2},
        (0, 6),
        {2: ("move", "open")},
    ),
    # ranks 2 and 3 are a node of their own, whose samples the others finish
    "a whole node": (TWO_STAGES, (0,), {2: ("step", 1, 2), 3: ("standby", 1)}),
}
# The only replica is lost: nobody holds the state.
ENDS = {"the only replica": (SHRINKING, (0,), {0: ("step", 1, 2)})}


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class DyingSet(ToySet):
    """Kills its process when it is asked for a sample at the chosen moment."""

    doomed = False

    def __getitem__(self, i):
        if self.doomed:
            die()
        return super().__getitem__(i)


def sets():
    train = ToySet(50, dtype=torch.float64, vouch=True)
    return train, DyingSet(40, seed=2, dtype=torch.float64)


def engine_for(counts, autodp, freeze_every=None, **plan):
    settings = config(
        plan=pt.PlanConfig(**plan), autodp=autodp, freeze_every=freeze_every
    )
    return make_engine(freeze=schedule(*counts), dtype=torch.float64, config=settings)


def lose(rank, case, environment):
    """Train in float64 over three epochs; ranks die as the case says."""
    os.environ.update(environment)
    if "node" in case:
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    plan, counts, deaths = {**CASES, **ENDS}[case]
    where = deaths.get(rank)
    torch.manual_seed(rank)
    engine, (train_set, test_set) = engine_for(counts, SURVIVING, **plan), sets()
    losses = []
    with engine:
        engine.prepare(train_set, BATCH)
        if where == ("move", "open"):
            transformation.move = die  # in the first change after the first plan
        for epoch in engine.epochs(EPOCHS):
            if where == ("standby", epoch):
                die()
            if where == ("close", epoch):
                OpenPass.close_segment = die
            for batch in engine.batches(train_set, BATCH):
                if where == ("step", epoch, batch.index):
                    die()
                engine.step(batch)
                if "within" in case and batch.index == 2:
                    test_set.doomed = where == ("within", epoch)
                    engine.evaluate(test_set)
            if where == ("between", epoch):
                die()
            if where in (("move", epoch), ("_prepare", epoch)):
                setattr(transformation, where[0], die)  # in the change that follows
            test_set.doomed = where == ("evaluate", epoch)
            losses.append(engine.evaluate(test_set)["loss"])
        last = moments(engine) if is_active(engine) else None
        lead = engine.is_main
    return {
        "losses": losses,
        "last": last,
        "lead": lead,
        "history": engine.history.to_json(),
    }


def train_alone(rank, schedules):
    """Train undisturbed with each schedule."""
    results = {}
    for counts, every in schedules:
        engine, (train_set, test_set) = engine_for(counts, QUICK, every), sets()
        losses = []
        with engine:
            for _ in engine.epochs(EPOCHS):
                for batch in engine.batches(train_set, BATCH):
                    engine.step(batch)
                losses.append(engine.evaluate(test_set)["loss"])
            results[counts, every] = losses, moments(engine)
    return results


def lose_store(rank, store_pid, environment):
    """Kill the store's process within a pass; report how this rank ends."""
    os.environ.update(environment)
    engine, (train_set, test_set) = engine_for((0, 3), SURVIVING, **TWO_STAGES), sets()
    losses = []
    try:
        with engine:
            for epoch in engine.epochs(EPOCHS):
                for batch in engine.batches(train_set, BATCH):
                    if rank == 0 and (epoch, batch.index) == (0, 2):
                        os.kill(store_pid, signal.SIGKILL)
                    engine.step(batch)
                while epoch == 0 and not engine._open().run.plane.store_lost:
                    engine._open().run.plane.check()
                    time.sleep(0.05)
                losses.append(engine.evaluate(test_set)["loss"])
    except pt.PeerFailure as failure:
        return str(failure)
    return engine.history.to_json(), losses
