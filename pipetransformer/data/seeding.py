"""Seeds the global generators for each sample that is loaded.

So what a dataset draws for a sample depends on the run's seed, the epoch and the sample
alone: not on how many processes load, nor on the replica that asks. A loader process
has its generators to itself; those of the program are the user's, and are put back.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import types
from collections.abc import Iterator

import torch
from torch.utils.data import get_worker_info

from pipetransformer.data.generators import GlobalGenerators
from pipetransformer.data.sampler import seed_of


def in_loader_process() -> bool:
    """Tell whether this process is a loader's."""
    return get_worker_info() is not None


def seed_generators(*parts: object) -> None:
    """Seed Python's, torch's and, once imported, numpy's generator of the host.

    Args:
        parts: Name the stream.
    """
    seed = seed_of(*parts)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = _numpy_random()
    if numpy is not None:
        numpy.seed(seed % 2**32)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the host's global generators back as they were, whatever is drawn within."""
    _numpy_random()
    kept = GlobalGenerators.now(set())
    try:
        yield
    finally:
        kept.restore()


def _numpy_random() -> types.ModuleType | None:
    # numpy imports it when somebody first draws: too late to seed it for that sample.
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None
