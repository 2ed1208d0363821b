"""Profiles a model on several CPU slots at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from pipetransformer import planner
from pipetransformer.planner import Profile
from simulated.steps import median_profile

DEADLINE_S = 60.0
PROFILES = 5


def profile_on_slots(
    models: Sequence[nn.Sequential],
    inputs: Tensor,
    sizes: Sequence[int],
    *,
    profiler: Callable[..., Profile] = planner.profile,
) -> Profile:
    """Return the median of what all slots measure at once, a thread each.

    Each of ``PROFILES`` profiles is one run per layer: the profiler takes the fastest
    of several runs, but a step, too, meets the moments in which the machine is slower.

    Processors that work at the same time share memory, caches and power: on two of
    them a layer takes longer than on one while the other stands still. In a pipeline
    all of them work.

    Args:
        models: Equal ones, one per slot.
        inputs: ``(rows, ...)``.
        sizes: Micro-batch sizes.
        profiler: Called as ``planner.profile``.
    """
    together = threading.Barrier(len(models), timeout=DEADLINE_S)

    def some(model: nn.Sequential) -> list[Profile]:
        torch.set_num_threads(1)  # of this thread
        found = []
        for _ in range(PROFILES):
            together.wait()
            found.append(profiler(model, inputs, microbatch_samples=sizes, repeats=1))
        return found

    if len(models) == 1:
        return median_profile(some(models[0]))
    with ThreadPoolExecutor(len(models)) as threads:
        found = threads.map(some, models)
        return median_profile([profile for profiles in found for profile in profiles])
