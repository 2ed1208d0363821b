"""A user's script for tests under a launcher: trains until it is stopped."""

import os
import pathlib
import sys
import time

import torch
from torch import nn

import pipetransformer as pt
from tests.support.toy import ToySet, toy_model, toy_units


def main(folder, counts):
    engine = pt.PipeTransformer(
        toy_model(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(counts),
        units=toy_units(),
        config=pt.Config(
            plan=pt.PlanConfig(
                slot_memory_bytes=13_500, reshape="always", replicas="all"
            ),
            checkpoint=pt.CheckpointConfig(directory=str(folder)),
        ),
    )
    start = time.monotonic()
    try:
        with engine:
            for epoch in engine.epochs(1000):
                role = "active" if engine.plan is not None else "standby"
                mark = folder / f"rank-{engine.rank}"
                text = f"{os.getpid()} {epoch} {role} {time.time()}"
                temporary = mark.with_suffix(".tmp")
                temporary.write_text(text)
                temporary.rename(mark)
                for batch in engine.batches(ToySet(50, vouch=True), 12):
                    engine.step(batch)
                    time.sleep(0.02)
    except pt.PeerFailure as failure:
        line = f"rank {engine.rank} after {time.monotonic() - start:.1f} s: {failure}"
        print(line, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")])
