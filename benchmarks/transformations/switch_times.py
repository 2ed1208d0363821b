"""Times one change of the active group without any model: protocol, group, collective.

Every rank is in every group, so that all of them build. A change takes as long as on
its slowest rank.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

from harness.forked import Log, Ranks
from pipetransformer.autodp import (
    ActiveGroup,
    AutoDPConfig,
    ControlPlane,
    PlanAgreement,
    build_group,
    connect,
)

PATIENT = AutoDPConfig(
    heartbeat_timeout=timedelta(seconds=20), protocol_timeout=timedelta(seconds=60)
)
PARTS = ("protocol", "group", "first_collective")
WARM_UP = 3  # changes that are not counted


def run_rank(rank: int, folder: Path, changes: int, cached: bool) -> None:
    """Change the group again and again; with `cached` between two that are kept."""
    log = Log(folder / f"rank-{rank}.jsonl")
    info, store = connect(PATIENT)
    plane = ControlPlane(store, info, PATIENT)
    members = list(range(info.world_size))
    old = build_group(plane, name="g/0", members=members)
    kept = [old, build_group(plane, name="kept", members=members)] if cached else []
    for epoch in range(1, WARM_UP + changes + 1):
        old.barrier()  # as at a step boundary: all come at the same time
        parts, old = _change(plane, old, epoch, kept)
        if epoch > WARM_UP:
            log.write("change", parts=parts)
    for group in kept or [old]:
        group.retire()
    plane.finish()


def _change(
    plane: ControlPlane, old: ActiveGroup, epoch: int, kept: Sequence[ActiveGroup]
) -> tuple[list[float], ActiveGroup]:
    """Return the seconds of `PARTS` and the group in use afterwards."""
    members, start = range(plane.world_size), time.perf_counter()
    transition = PlanAgreement(
        plane, epoch, writer=plane.rank == 0, participants=list(members)
    )
    if plane.rank == 0:
        transition.announce(b"plan")
    else:
        transition.receive()
    began = time.perf_counter()
    if kept:
        new = kept[epoch % len(kept)]
    else:
        new = build_group(plane, name=f"g/{epoch}", members=list(members))
    built = time.perf_counter()
    transition.acknowledge()
    if not transition.decide():
        raise RuntimeError(f"change {epoch}: expected COMMIT: {transition.reason}")
    decided = time.perf_counter()
    new.all_reduce_(torch.ones(1))
    end = time.perf_counter()
    if not kept:
        old.retire()
    return [began - start + decided - built, built - began, end - decided], new


def switch_times(world_size: int, changes: int, *, cached: bool) -> list[list[float]]:
    """Return, per change, the seconds of `PARTS` on its slowest rank.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(run_rank, world_size, folder, changes, cached) as ranks:
            for process in ranks.processes:
                process.join(60.0 + changes)
            logs, errors = ranks.logs(), ranks.errors()
    if any(errors) or any(len(log) != changes for log in logs):
        raise RuntimeError(f"switches of {world_size}: expected all, got {errors}")
    each = zip(*([line["parts"] for line in log] for log in logs), strict=True)
    return [max(ranks_parts, key=sum) for ranks_parts in each]
