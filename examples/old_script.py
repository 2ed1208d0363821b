"""A script written for ``torch.distributed.pipeline.sync``; only two lines are new.

Two processes train one pipeline each, under DistributedDataParallel, on a toy task.
"""

import gc
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pipetransformer.compat  # new

pipetransformer.compat.install()  # new

from torch.distributed.pipeline.sync import Pipe  # noqa: E402
from torch.distributed.pipeline.sync.skip import (  # noqa: E402
    pop,
    skippable,
    stash,
)
from torch.distributed.pipeline.sync.utils import partition_model  # noqa: E402

WORLD_SIZE, STEPS, BATCH = 2, 40, 64


@skippable(stash=["residual"])
class Split(nn.Module):
    """Passes its input on, and around the layers that follow."""

    def forward(self, x):
        """Stash the input."""
        yield stash("residual", x)
        return x


@skippable(pop=["residual"])
class Join(nn.Module):
    """Adds what went around."""

    def forward(self, x):
        """Pop and add."""
        residual = yield pop("residual")
        return x + residual


def build_model():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(16, 32),
        Split(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.1),
        Join(),
        nn.Linear(32, 2),
    )
    stages = partition_model(layers, [3, 3, 2], devices=["cpu"] * 3)
    return Pipe(stages, chunks=8, deferred_batch_norm=True)


def main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    train(rank)
    # After the model: a reducer that holds the last reference to its group takes it
    # apart under the interpreter's lock, which gloo's threads may be waiting for.
    gc.collect()
    dist.destroy_process_group()


def train(rank):
    torch.manual_seed(rank)
    model = DDP(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 16)
        targets = (inputs.sum(dim=1) > 0).long()
        optimizer.zero_grad()
        output = model(inputs).local_value()
        loss = criterion(output, targets)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            correct = (output.argmax(dim=1) == targets).float().mean()
            print(f"step {step + 1}: loss {loss:.3f}, accuracy {correct:.2f}")
    model.eval()
    with torch.no_grad():
        inputs = torch.randn(512, 16)
        output = model(inputs).local_value()
    correct = (output.argmax(dim=1) == (inputs.sum(dim=1) > 0)).float().mean()
    if rank == 0:
        print(f"test accuracy {correct:.2f}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    mp.spawn(main, args=(free_port(),), nprocs=WORLD_SIZE)
