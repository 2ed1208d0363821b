"""One part of a run whose whole job is killed again and again; one rank of it."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipetransformer as pt
from faults.small_run import DEPTH, Deadlines, Momentum, SmallSet, small_model
from harness.forked import Log
from harness.private import model_of, run_of

SAMPLES, BATCH, STEPS = 90, 12, 8  # the last batch of an epoch has six rows
TEST_SAMPLES = 21
FREEZES = (0, 0, 2, 2, 4, 5, 5, 0, 0, 3, 6, 6)  # one entry per epoch; down and up
EVERY_STEPS, KEEP = 3, 3
PLACES = (
    "between steps",
    "in forward",
    "in optimizer step",
    "in evaluation",
    "in checkpoint",
)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a job does from its start to its end.

    Attributes:
        number: Of the part in its run, from 0.
        world_size: N.
        num_stages: K, of CPU slots of one process where N = 1.
        epochs: Of the whole run.
        cache: Whether frozen activations are cached.
        kill_step: Optimizer steps after which the job is killed; None: never.
        place: Where in the script; the first such place after that many steps.
        perturbation: Relative change of the weights that the run starts with.
    """

    number: int
    world_size: int
    num_stages: int
    epochs: int
    cache: bool = True
    kill_step: int | None = None
    place: str = PLACES[0]
    perturbation: float = 0.0


class Killer:
    """Kills the whole job at the place and step of a part; on rank 0."""

    def __init__(self, part: Part, rank: int, folder: Path) -> None:
        self._part = part
        self._armed = rank == 0 and part.kill_step is not None
        self._folder = folder
        self.step = 0

    def at(self, place: str) -> None:
        """Kill every process of the job, this one last, if it is the time."""
        part = self._part
        if not self._armed or part.kill_step is None:
            return
        if place != part.place or self.step < part.kill_step:
            return
        others = range(1, part.world_size)
        pids = [int((self._folder / f"pid-{rank}").read_text()) for rank in others]
        for pid in (*pids, os.getpid()):
            os.kill(pid, signal.SIGKILL)


def run_part(rank: int, folder: Path, part: Part, checkpoints: str) -> None:
    """Train from the newest valid checkpoint to the end, or to the kill."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    killer = Killer(part, rank, folder)
    log = Log(folder / f"rank-{rank}.jsonl")
    written = os.fsync

    def fsync(fd: Any) -> None:
        killer.at("in checkpoint")
        written(fd)

    os.fsync = fsync
    engine = _engine(part, checkpoints, killer)
    with engine:
        _train(engine, part, killer, log)
    if rank == 0:
        weights = [p.detach() for p in model_of(engine).parameters()]
        torch.save(weights, folder / "weights.pt")


def _train(engine: pt.PipeTransformer, part: Part, killer: Killer, log: Log) -> None:
    train_set, test_set = SmallSet(SAMPLES), SmallSet(TEST_SAMPLES, seed=2)
    state = run_of(engine).state
    killer.step = state.step
    log.write("start", step=state.step)

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        killer.at("in evaluation")
        return (outputs.argmax(1) == targets).double()

    for epoch in engine.epochs(part.epochs):
        for batch in engine.batches(train_set, BATCH):
            killer.at("between steps")
            step = state.step
            loss = float(engine.step(batch))
            killer.step = state.step
            ids = batch.ids.tolist()
            log.write("step", step=step, epoch=epoch, ids=ids, loss=loss)
        if engine.plan is not None:
            shape = list(engine.plan.shape)
            log.write("plan", epoch=epoch, boundary=engine.plan.boundary, shape=shape)
        result = engine.evaluate(test_set, {"accuracy": metric})
        log.write("evaluation", epoch=epoch, loss=result["loss"])


def _engine(part: Part, checkpoints: str, killer: Killer) -> pt.PipeTransformer:
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + part.perturbation)

    def loss(outputs: Any, targets: Any) -> Tensor:
        if torch.is_grad_enabled():
            killer.at("in forward")
        return nn.functional.cross_entropy(outputs, targets)

    return pt.PipeTransformer(
        model,
        optimizer=lambda params: Momentum(
            params, lambda: killer.at("in optimizer step")
        ),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10, 0.9),
        loss=loss,
        freeze=pt.freeze.Schedule(list(FREEZES[: part.epochs])),
        units=list(range(2, DEPTH + 2)),
        config=pt.Config(
            seed=3,
            eval_microbatch_rows=8,
            plan=pt.PlanConfig(
                num_stages=part.num_stages,
                num_microbatches=2,
                reshape="always",
                replicas="all",
            ),
            pipe=pt.PipeConfig(
                num_slots=part.num_stages if part.world_size == 1 else 1,
                threads_per_stage=1,
            ),
            cache=pt.CacheConfig(enabled=part.cache),
            checkpoint=pt.CheckpointConfig(
                directory=checkpoints, every_steps=EVERY_STEPS, keep=KEEP, resume=True
            ),
            autodp=Deadlines(heartbeat=20.0, protocol=60.0, store=60.0).config(),
        ),
    )
