"""Seeds the global generators of a loader process for each sample it loads.

So what a dataset draws for a sample depends on the run's seed, the epoch and the sample
alone: not on how many processes load, nor on the replica that asks.
"""

from __future__ import annotations

import random
import sys

import torch
from torch.utils.data import get_worker_info

from pipetransformer.data.sampler import seed_of


def seed_loader_process(*parts: object) -> None:
    """Seed Python's, torch's and, once imported, numpy's generator of the host.

    Does nothing in a process that is no loader's: those generators are the program's.

    Args:
        parts: Name the stream.
    """
    if get_worker_info() is None:
        return
    seed = seed_of(*parts)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)
