"""A user's script for tests under a launcher that restarts it: resumes by itself."""

import json
import os
import pathlib
import signal
import sys

import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import QUICK
from tests.support.private import run_of
from tests.support.toy import ToySet, toy_model, toy_units

EPOCHS, STEPS, SAMPLES = 3, 5, 50


def train(rank, folder, victim=None, step=None):
    """Train on two replicas; log (step, ids, loss) of each of this rank's steps.

    Args:
        rank: This process; rank `victim` kills itself once, before optimizer step
            `step`, in the middle of its computation.
        folder: For logs and checkpoints.
    """
    state = folder / "killed"

    def loss(outputs, targets):
        run = run_of(engine)
        if (rank, run.state.step) == (victim, step) and not state.exists():
            state.write_text(str(step))
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, targets)

    engine = pt.PipeTransformer(
        toy_model(dropout=0.1),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 4, 0.9),
        loss=loss,
        freeze=pt.freeze.Schedule([0, 2]),
        units=toy_units(),
        config=pt.Config(
            autodp=QUICK,
            plan=pt.PlanConfig(num_stages=1, num_microbatches=1, replicas="all"),
            # Rows whose frozen activations a part of the run before had cached would
            # be computed with fewer others, and get other bits.
            cache=pt.CacheConfig(enabled=False),
            checkpoint=pt.CheckpointConfig(
                directory=str(folder / "checkpoints"), every_steps=2, resume=True
            ),
        ),
    )
    with open(folder / f"log-{rank}", "a") as log, engine:
        for _ in engine.epochs(EPOCHS):
            for batch in engine.batches(ToySet(SAMPLES), 12):
                at = run_of(engine).state.step
                mean = float(engine.step(batch))
                log.write(json.dumps([at, batch.ids.tolist(), mean]) + "\n")
                log.flush()
    return "finished"


def logged(folder, rank):
    """Return {step: (ids, loss)}; of a step that was done twice, the last."""
    lines = (folder / f"log-{rank}").read_text().splitlines()
    return {at: (ids, mean) for at, ids, mean in map(json.loads, lines)}


def main(folder, victim, step):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "0":
        # As if the machine had gone down while the newest file was being written.
        torn = folder / "checkpoints" / "step-0000000099.pt"
        torn.write_bytes(b"PK\3\4" + bytes(1000))
    train(int(os.environ["RANK"]), folder, victim, step)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
