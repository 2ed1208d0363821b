"""What the fork server imports once, so that ranks start within milliseconds.

Imported by the server process alone, see `tests.support.fork_server`. Nothing here
may start a thread: a fork copies the thread that calls it and the locks of the rest.
"""

import gc
import os
from importlib import import_module

from tests.support.lifeline import die_with

die_with(os.getppid())

for name in (
    "pytest.__main__",  # the main module, which every child imports under its own name
    "torch",
    "torch._dynamo",  # imported by the first optimizer and the first DDP
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "pipetransformer.compat",
    "pipetransformer.engine",
    "pipetransformer.explanation",
    "tests.support.toy",
):
    import_module(name)


def step_an_optimizer():
    """Make torch import what the first optimizer step imports.

    Which modules these are differs between the versions of torch, and they are private.
    """
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


step_an_optimizer()


def num_threads():
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


if num_threads() != 1:
    raise RuntimeError(f"fork server: expected one thread, got {num_threads()}")

# What is shared stays shared: the collector of a child does not write to it.
gc.collect()
gc.freeze()
