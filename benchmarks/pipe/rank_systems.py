"""Rivals of one process per device: torch.distributed.pipelining, and DDP."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from pipe.encoder import Shape, batch, encoder, mean_loss, train_step

DDP = "ddp"
SCHEDULES: dict[str, type[ScheduleGPipe] | type[Schedule1F1B]] = {
    "pipelining gpipe": ScheduleGPipe,
    "pipelining 1f1b": Schedule1F1B,
}
DEADLINE = datetime.timedelta(seconds=60)


class RankSystems:
    """All process systems of one rank; each is built when it is first asked for.

    Commands: ``("run", system, M, steps)`` returns wall and CPU seconds,
    ``("gradients", system, M)`` each parameter's sum of squared gradients.

    Args:
        rank: Of this process.
        world_size: Number of processes: stages, or replicas.
        store: Path of a file store.
        shape: Of the encoder; its blocks are cut into equal stages.
        seed: Of its weights and of the batch.
    """

    def __init__(
        self, rank: int, world_size: int, store: str, shape: Shape, seed: int
    ) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=DEADLINE,
        )
        self._rank = rank
        self._world_size = world_size
        self._model = encoder(shape, seed)
        self._inputs, self._targets = batch(shape, seed)
        self._steps: dict[tuple[str, int], Callable[[], None]] = {}

    def __call__(
        self, what: str, system: str, microbatches: int, steps: int = 1
    ) -> tuple[float, ...]:
        """Answer a command."""
        key = (system, microbatches)
        if key not in self._steps:
            self._steps[key] = self._build(system, microbatches)
        step = self._steps[key]
        self._model.zero_grad()  # also what another system left
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        times = time.perf_counter() - wall, time.process_time() - cpu
        return times if what == "run" else self._gradients()

    def _build(self, system: str, microbatches: int) -> Callable[[], None]:
        if system == DDP:
            return self._ddp()
        stage = PipelineStage(
            self._stage(), self._rank, self._world_size, torch.device("cpu")
        )
        schedule = SCHEDULES[system](stage, microbatches, loss_fn=mean_loss)

        def step() -> None:
            stage.submod.zero_grad()
            if self._rank == 0:
                schedule.step(self._inputs, return_outputs=False)
            elif self._rank == self._world_size - 1:
                schedule.step(target=self._targets, losses=[], return_outputs=False)
            else:
                schedule.step(return_outputs=False)

        return step

    def _ddp(self) -> Callable[[], None]:
        ddp = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        inputs = self._inputs.chunk(self._world_size)[self._rank]
        targets = self._targets.chunk(self._world_size)[self._rank]
        return lambda: train_step(ddp, inputs, targets)

    def _stage(self) -> nn.Sequential:
        size = len(self._model) // self._world_size
        layers = list(self._model)
        return nn.Sequential(*layers[self._rank * size : (self._rank + 1) * size])

    def _gradients(self) -> tuple[float, ...]:
        return tuple(
            float(parameter.grad.square().sum()) if parameter.grad is not None else 0.0
            for parameter in self._model.parameters()
        )
