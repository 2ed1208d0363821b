"""A device that runs out of memory: the run goes on under a plan that takes less.

The rank fails the generation, which nobody leaves: every rank comes to the roll call,
learns the lower limit, and the plan is made again. So the call is repeated under it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterator, Mapping

import torch

from pipetransformer.autodp import PeerFailure
from pipetransformer.core.devices import empty_caches
from pipetransformer.recovery.decision import RankReport
from pipetransformer.run.context import Run

_LOG = logging.getLogger(__name__)

_LESS = 0.9  # of what a plan was predicted to take that took more than there is
_PHASE = "out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a device had no memory left; libraries of CUDA say so in words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, PeerFailure) or not isinstance(error, RuntimeError):
        return False
    return "out of memory" in str(error).lower()


def give_way(run: Run, error: BaseException) -> bool:
    """Have every rank make a plan that takes less, if the error is for want of memory.

    Args:
        run: The run; `Run.memory_limit` is lowered on this rank.
        error: What a call that ranks meet in has raised here.

    Returns:
        Whether it was; the generation has failed then.
    """
    plane = run.plane
    if run.slots.on_host or not plane.survives or plane.failure is not None:
        return False
    if not is_out_of_memory(error):
        return False
    cluster, plan = run.inputs.cluster, run.in_force.plan
    if cluster is None:
        return False
    taken = max(plan.bytes_per_stage, default=0) if plan is not None else 0
    bytes_before = min(
        taken or cluster.device_memory_bytes, cluster.device_memory_bytes
    )
    run.memory_limit = max(1, int(bytes_before * _LESS))
    _LOG.warning(
        "rank %d ran out of memory, where %.1f MB of a slot were to be enough: plans "
        "may take %.1f MB from here on (%s)",
        run.info.rank,
        bytes_before / 1e6,
        run.memory_limit / 1e6,
        str(error).partition(". ")[0],
    )
    plane.fail(_PHASE, f"of rank {run.info.rank}", rank=-1)
    return True


@contextlib.contextmanager
def giving_way(run: Run) -> Iterator[None]:
    """Let the body's want of memory end in a plan that takes less; see `give_way`."""
    try:
        yield
    except Exception as error:
        give_way(run, error)
        raise


def agree_on_limit(run: Run, reports: Mapping[int, RankReport]) -> None:
    """Take over the lowest limit that a rank knows; equal on every survivor."""
    limits = [r.memory_limit for r in reports.values() if r.memory_limit is not None]
    cluster = run.inputs.cluster
    if not limits or cluster is None:
        return
    run.memory_limit = min(limits)
    gc.collect()  # frames of the call that failed hold what it had computed
    empty_caches(run.slots.devices)
    if run.memory_limit < cluster.device_memory_bytes:
        run.inputs.cluster = dataclasses.replace(
            cluster, device_memory_bytes=run.memory_limit
        )
