"""A device that runs out of memory: the run goes on, with less on the device.

The rank gives up its copies of cached records, if there are any; else plans have to
take less. It fails the generation, which nobody leaves: every rank comes to the roll
call, learns the lower limit, and the plan is made again. So the call is repeated.
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
    """Have every rank plan again, for less memory, if the error is for want of it.

    Args:
        run: The run; on this rank `Run.drops_copies` is set where there are copies of
            records, else `Run.memory_limit` is lowered.
        error: What a call that ranks meet in has raised here.

    Returns:
        Whether it was; the generation has failed then.
    """
    plane = run.plane
    if run.slots.on_host or not plane.survives or plane.failure is not None:
        return False
    if not is_out_of_memory(error):
        return False
    cluster = run.inputs.cluster
    if cluster is None:
        return False
    if copied := run.copied_bytes:
        run.drops_copies = True
        _LOG.warning(
            "rank %d ran out of memory, and gives up %.1f MB of copies of cached "
            "records on its device (%s)",
            run.info.rank,
            copied / 1e6,
            _first_sentence(error),
        )
    else:
        _lower_limit(run, cluster.device_memory_bytes, error)
    plane.fail(_PHASE, f"of rank {run.info.rank}", rank=-1)
    return True


def _lower_limit(run: Run, slot_bytes: int, error: BaseException) -> None:
    plan = run.in_force.plan
    taken = max(plan.bytes_per_stage, default=0) if plan is not None else 0
    bytes_before = min(taken or slot_bytes, slot_bytes)
    run.memory_limit = max(1, int(bytes_before * _LESS))
    _LOG.warning(
        "rank %d ran out of memory, where %.1f MB of a slot were to be enough: plans "
        "may take %.1f MB from here on (%s)",
        run.info.rank,
        bytes_before / 1e6,
        run.memory_limit / 1e6,
        _first_sentence(error),
    )


def _first_sentence(error: BaseException) -> str:
    return str(error).partition(". ")[0]


@contextlib.contextmanager
def giving_way(run: Run) -> Iterator[None]:
    """Let the body's want of memory end in a run that takes less; see `give_way`."""
    try:
        yield
    except Exception as error:
        give_way(run, error)
        raise


def agree_on_limit(run: Run, reports: Mapping[int, RankReport]) -> None:
    """Take over the lowest limit that a rank knows; equal on every survivor.

    So is whether there are copies of records: ranks that run out one after the other
    would each have the operation done again.
    """
    limits = [r.memory_limit for r in reports.values() if r.memory_limit is not None]
    dropped = any(report.drops_copies for report in reports.values())
    cluster = run.inputs.cluster
    if dropped:
        run.keeps_copies = run.drops_copies = False
    if cluster is None or not (limits or dropped):
        return
    gc.collect()  # frames of the call that failed hold what it had computed
    empty_caches(run.slots.devices)
    if not limits:
        return
    run.memory_limit = min(limits)
    if run.memory_limit < cluster.device_memory_bytes:
        run.inputs.cluster = dataclasses.replace(
            cluster, device_memory_bytes=run.memory_limit
        )
