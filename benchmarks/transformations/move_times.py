"""Times the hand-over of a model's state alone: all ranks come at the same time.

Rank 0 holds weights, moments and scheduler after a step; all others receive them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from harness.common import Row
from harness.forked import Log, Ranks
from pipetransformer.autodp import ControlPlane, build_group, connect
from pipetransformer.core.devices import HOST
from pipetransformer.report import Phases
from pipetransformer.run.context import Run
from pipetransformer.run.placement import Placement
from pipetransformer.run.slots import Slots
from pipetransformer.state.state import TrainingState
from pipetransformer.transformation import rewire
from transformations.pause_runs import Load
from transformations.switch_times import PATIENT

WARM_UP = 2  # hand-overs that are not counted


def run_rank(rank: int, folder: Path, load: Load, moves: int) -> None:
    """Hand a fresh model's state over, again and again."""
    log = Log(folder / f"rank-{rank}.jsonl")
    info, store = connect(PATIENT)
    plane = ControlPlane(store, info, PATIENT)
    group = build_group(plane, name="g/0", members=list(range(info.world_size)))
    for number in range(WARM_UP + moves):
        run = _Run(load, info, plane)
        if rank == 0:
            run.take_step()
        group.barrier()
        group.barrier()  # whoever came last to the first one is not late here
        phases, began = Phases(), time.perf_counter()
        moved = rewire.move(cast(Run, run), group, 0, range(1, group.size), phases)
        seconds = time.perf_counter() - began
        if number >= WARM_UP:
            log.write("move", seconds=seconds, phases=phases.seconds, moved=moved)
    group.retire()
    plane.finish()


class _Run(SimpleNamespace):
    """What `rewire.move` uses of a run."""

    def __init__(self, load: Load, info: Any, plane: ControlPlane) -> None:
        state = TrainingState(load.model())
        on_host = Slots((HOST,) * info.local_world_size, info.local_rank)
        timeout = PATIENT.protocol_timeout
        super().__init__(
            state=state,
            placement=Placement(on_host, plane, state, None, timeout),
            arguments=SimpleNamespace(untrained=frozenset()),
            info=info,
            config=SimpleNamespace(autodp=PATIENT),
        )

    def build_optimizer(self) -> None:
        self.state.build_optimizer(
            list(self.state.model.parameters()),
            lambda params: torch.optim.AdamW(params, lr=1e-4),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        )

    def restore_optimizer(self) -> None:
        """Do nothing: there is no checkpoint."""

    def take_step(self) -> None:
        self.build_optimizer()
        for parameter in self.state.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)


def move_rows(load: Load, world_size: int, moves: int) -> list[Row]:
    """Return seconds of each move on its slowest rank, its parts, and the rate.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(run_rank, world_size, folder, load, moves) as ranks:
            for process in ranks.processes:
                process.join(120.0 + 20.0 * moves)
            logs, errors = ranks.logs(), ranks.errors()
    if any(errors) or any(len(log) != moves for log in logs):
        raise RuntimeError(f"moves of {load.name}: expected all, got {errors}")
    slowest = [
        max(lines, key=lambda line: float(line["seconds"]))
        for lines in zip(*logs, strict=True)
    ]
    return _rows(f"state of {load.name} to {world_size - 1}", slowest)


def _rows(system: str, moves: Sequence[dict[str, Any]]) -> list[Row]:
    whole = tuple(1e3 * move["seconds"] for move in moves)
    rate = tuple(move["moved"] / move["seconds"] / 1e6 for move in moves)
    rows = [Row(system, "move", "ms", whole), Row(system, "rate", "MB/s", rate)]
    for phase in moves[0]["phases"]:
        parts = tuple(1e3 * move["phases"][phase] for move in moves)
        rows.append(Row(system, phase.rpartition("/")[2], "ms", parts))
    return rows
