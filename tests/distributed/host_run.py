"""What each process does on its simulated host: the demo's model, step by step."""

import logging
import os
import pathlib
import time
from datetime import timedelta
from functools import partial

import torch
from torch import nn

import pipetransformer as pt
from tests.distributed.namespaces import TwoHosts, enter
from vit_digits import accuracy, build_vit, freeze_units, load_split

MEBIBYTE = 2**20
BATCH = 32


class Lines(logging.Handler):
    """Keeps what the engine says."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _place(rank, names, local_world_size):
    node = rank // local_world_size
    enter(names[node])
    os.environ.update(
        LOCAL_WORLD_SIZE=str(local_world_size),
        LOCAL_RANK=str(rank % local_world_size),
        GROUP_RANK=str(node),
        MASTER_ADDR=TwoHosts.address(0),
    )
    return node


def _engine(heartbeat_timeout_s):
    torch.manual_seed(0)
    model = build_vit()
    return pt.PipeTransformer(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        units=freeze_units(model),
        config=pt.Config(
            # Half the model in a slot: K=2, one replica on each host.
            plan=pt.PlanConfig(
                slot_memory_bytes=19 * MEBIBYTE,
                num_stages=2,
                num_microbatches=4,
                replicas="all",
            ),
            checkpoint=pt.CheckpointConfig(directory="checkpoints"),
            autodp=pt.AutoDPConfig(
                heartbeat_timeout=timedelta(seconds=heartbeat_timeout_s)
            ),
        ),
    )


def train(rank, names, local_world_size, folder, epochs, heartbeat_timeout_s):
    """Train on a simulated host; return how it went and when it ended.

    Times are those of the monotonic clock, which all processes of a machine share.
    """
    node = _place(rank, names, local_world_size)
    folder = pathlib.Path(folder)
    said = Lines()
    logging.getLogger("pipetransformer").addHandler(said)
    logging.getLogger("pipetransformer").setLevel(logging.INFO)
    home = folder / f"host-{node}"  # every rank has the same config, not the same disk
    home.mkdir(exist_ok=True)
    os.chdir(home)
    engine = _engine(heartbeat_timeout_s)
    train_set, test_set = load_split()
    steps = [time.monotonic()]
    outcome, text = "finished", ""
    try:
        with engine:
            for _ in engine.epochs(epochs):
                for batch in engine.batches(train_set, batch_size=BATCH):
                    engine.step(batch)
                    steps.append(time.monotonic())
                    (folder / f"step-{rank}").write_text(str(len(steps) - 1))
                engine.evaluate(test_set, {"accuracy": accuracy})
    except pt.PeerFailure as failure:
        outcome, text = "PeerFailure", str(failure)
    gaps = [b - a for a, b in zip(steps[1:], steps[2:], strict=False)]
    return {
        "rank": rank,
        "host": node,
        "role": "active" if len(steps) > 1 else "standby",
        "outcome": outcome,
        "text": text,
        "ended": time.monotonic(),
        "steps": len(steps) - 1,
        "longest_gap_s": max(gaps, default=None),
        "said": said.lines,
        "samples": [epoch.samples for epoch in engine.history.epochs],
        "unique_samples": [epoch.unique_samples for epoch in engine.history.epochs],
    }
