"""Rank functions for a process that comes in a lost rank's place."""

import dataclasses
import logging
import os
import time
from datetime import timedelta

import pipetransformer as pt
from tests.engine.losses import BATCH, EPOCHS, SURVIVING, die, engine_for, sets
from tests.engine.scenario import is_active, moments

COUNTS = (0, 3)
IN_VAIN = dataclasses.replace(SURVIVING, store_timeout=timedelta(seconds=5))


class Warned(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def come_again(number, world, plan, folder, environment):
    """Train with `world` ranks, of which 1 is lost; one more process comes for it.

    Rank 0 waits until that one has ended: the run is there as long as it tries.
    """
    late = number == world
    rank = str(1 if late else number)
    os.environ.update(environment, RANK=rank, LOCAL_RANK=rank)
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    if not late:
        return train(number, plan, folder)
    wait_for(folder / "lost")
    try:
        with engine_for(COUNTS, IN_VAIN, **plan):
            return "joined"
    except pt.PeerFailure as failure:
        return str(failure)
    finally:
        (folder / "ended").touch()


def train(rank, plan, folder):
    engine, (train_set, test_set) = engine_for(COUNTS, SURVIVING, **plan), sets()
    losses, warned = [], Warned()
    logging.getLogger("pipetransformer").addHandler(warned)
    with engine:
        for epoch in engine.epochs(EPOCHS):
            for batch in engine.batches(train_set, BATCH):
                if (rank, epoch, batch.index) == (1, 0, 2):
                    lose(folder)
                engine.step(batch)
                if (rank, epoch, batch.index) == (0, 1, 1):
                    wait_for(folder / "ended")
            if rank == 1:
                lose(folder)
            losses.append(engine.evaluate(test_set)["loss"])
        last = moments(engine) if is_active(engine) else None
    return losses, last, engine.history.to_json(), warned.texts


def lose(folder):
    (folder / "lost").touch()
    die()


def wait_for(path):
    end = time.monotonic() + 80
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} was never written")
        time.sleep(0.05)
