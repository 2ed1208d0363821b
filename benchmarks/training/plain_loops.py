"""Rivals without the engine: one process, DistributedDataParallel, a given pipeline.

They train on the batches of the same sampler, so the only difference is the system.
Nothing of ``pipetransformer`` computes here; its clock and its records do the
book-keeping.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pipe.pipes import load_factory, tensor_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pipetransformer as pt
from pipetransformer.data.loading import ElasticSampler
from training import workload
from training.frozen_prefix import FrozenPrefix, frozen_units
from vit_digits import Digits, accuracy, load_split

DEADLINE = datetime.timedelta(seconds=120)
EVAL_ROWS = 64  # of a micro-batch
TRAIN, TEST = "train", "test"


class PlainLoop:
    """An ordinary training loop over one replica's part of each global batch.

    Args:
        call: Gives outputs for inputs; its backward averages over replicas.
        model: Holds the parameters.
        args: Of the worker: ``seed``, ``epochs`` and, with a prefix, ``alpha``.
        shape: K, R and M, for the records.
        rank: Of this replica.
        data: Training and test set.
        prefix: Takes over the front layers as they freeze; None: nothing freezes.
    """

    def __init__(
        self,
        call: Callable[[Tensor], Any],
        model: nn.Sequential,
        args: argparse.Namespace,
        shape: pt.report.PlanShape,
        rank: int,
        data: tuple[Digits, Digits],
        prefix: FrozenPrefix | None = None,
    ) -> None:
        self._call = call
        self._model = model
        self._args = args
        self._shape = shape
        self._rank = rank
        self._train_set, self._test_set = data
        self._prefix = prefix
        self._sampler = ElasticSampler(
            len(self._train_set),
            workload.BATCH_SIZE,
            seed=args.seed,
            replicas_on_node=shape.num_replicas,
            replica_on_node=rank,
        )
        steps = args.epochs * self._sampler.num_batches
        self._optimizer = workload.make_optimizer(model, model.parameters())
        self._scheduler = workload.make_scheduler(steps, self._optimizer)
        self._reduced: list[Tensor] = []
        self._clock = pt.report.Clock()
        self.history = pt.report.History(world_size=shape.num_replicas, seed=args.seed)

    def run(self) -> None:
        """Train and evaluate each epoch, and record them."""
        for epoch in range(self._args.epochs):
            if self._prefix is not None:
                with self._clock.phase("transformation"):
                    self._freeze(self._prefix, epoch)
            record = self._train(epoch)
            with self._clock.phase("evaluate"):
                record.metrics.update(self._evaluate())
            self.history.epochs.append(record)
        self.history.phase_seconds = self._clock.seconds()

    def _freeze(self, prefix: FrozenPrefix, epoch: int) -> None:
        units = workload.UNITS
        frozen = frozen_units(self._args.alpha, len(units), epoch)
        boundary = units[frozen - 1] if frozen else 0
        if boundary > prefix.boundary:
            self._call = prefix.freeze(boundary)
        self._shape = replace(self._shape, num_frozen_layers=frozen, boundary=boundary)

    def _train(self, epoch: int) -> pt.report.EpochRecord:
        start, before = time.perf_counter(), self._clock.seconds()
        self._sampler.set_epoch(epoch)
        loader = DataLoader(self._train_set, batch_sampler=self._sampler)
        self._train_mode(True)
        cached = self._prefix is not None and self._prefix.kept(TRAIN)
        loss_sum, batches = 0.0, iter(loader)
        for batch, ids in enumerate(self._sampler):
            with self._clock.phase("data"):
                inputs, targets = next(batches)
            loss = self._step(torch.tensor(ids), inputs, targets, batch)
            loss_sum += loss * len(ids)
        if self._prefix is not None:
            self._prefix.end_pass(TRAIN)
        samples = len(self._train_set)
        return pt.report.EpochRecord(
            epoch=epoch,
            shape=self._shape,
            samples=samples,
            unique_samples=samples,
            optimizer_steps=len(loader),
            seconds=time.perf_counter() - start,
            train_loss=self._sum_of_replicas(loss_sum) / samples,
            cache_hits=samples if cached else 0,
            cache_misses=0 if cached else samples,
            phase_seconds=self._clock.since(before),
            elapsed_seconds=self._clock.elapsed(),
        )

    def _train_mode(self, on: bool) -> None:
        self._model.train(on)
        if isinstance(self._call, nn.Module):
            self._call.train(on)  # a pipeline's stages are modules of their own

    def _outputs(self, name: str, ids: Tensor, inputs: Tensor) -> Tensor:
        if self._prefix is not None:
            inputs = self._prefix(name, ids, inputs)
        return tensor_of(self._call(inputs))

    def _step(self, ids: Tensor, inputs: Tensor, targets: Tensor, batch: int) -> float:
        with self._clock.phase("forward"):
            outputs = self._outputs(TRAIN, ids, inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise FloatingPointError(f"loss: expected a finite one, got {value}")
        with self._clock.phase("backward"):
            global_rows = self._sampler.global_rows(batch)
            share = self._shape.num_replicas * len(targets) / global_rows
            (loss * share).backward()  # type: ignore[no-untyped-call]
        with self._clock.phase("optimizer"):
            self._optimizer.step()
            self._scheduler.step()
            self._optimizer.zero_grad(set_to_none=True)
        return value

    def _evaluate(self) -> dict[str, float]:
        inputs, targets = self._test_set.tensors()
        size, total = self._shape.num_replicas, len(targets)
        mine = torch.arange(
            total * self._rank // size, total * (self._rank + 1) // size
        )
        self._train_mode(False)
        with torch.no_grad():
            outputs = [
                self._outputs(TEST, ids, inputs[ids])
                for ids in torch.split(mine, EVAL_ROWS * self._shape.num_microbatches)
            ]
        if self._prefix is not None:
            self._prefix.end_pass(TEST)
        right = accuracy(torch.cat(outputs), targets[mine]).double().sum()
        return {"accuracy": self._sum_of_replicas(float(right)) / total}

    def _sum_of_replicas(self, value: float) -> float:
        if self._shape.num_replicas == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        # gloo's thread drops its reference later. Were it the last, it would wait
        # for the interpreter, which may be waiting for that thread to end.
        self._reduced.append(total)
        return float(total)


def run_plain(model: nn.Sequential, args: argparse.Namespace) -> pt.report.History:
    """Train in this one process, which computes with a thread per slot."""
    torch.set_num_threads(args.slots)
    data = load_split()
    start = time.perf_counter()
    shape = pt.report.PlanShape(0, 0, 1, 1, 1)
    loop = PlainLoop(model, model, args, shape, 0, data)
    loop.run()
    loop.history.total_seconds = time.perf_counter() - start
    return loop.history


def run_ddp(
    model: nn.Sequential, args: argparse.Namespace, *, freezes: bool = False
) -> pt.report.History:
    """Train with torch's DDP, one replica per process.

    Args:
        model: The model.
        args: Of the worker.
        freezes: Front layers freeze and are cached, see `FrozenPrefix`.
    """
    data = load_split()
    start = time.perf_counter()
    dist.init_process_group("gloo", timeout=DEADLINE)
    with contextlib.ExitStack() as exits:
        exits.callback(dist.destroy_process_group)
        # After the model: a reducer that held the last reference to its group would
        # take it apart under the interpreter's lock, which gloo's threads may want.
        exits.callback(gc.collect)
        history = _train_ddp(model, args, data, freezes)
    history.total_seconds = time.perf_counter() - start
    return history


def _train_ddp(
    model: nn.Sequential,
    args: argparse.Namespace,
    data: tuple[Digits, Digits],
    freezes: bool,
) -> pt.report.History:
    shape = pt.report.PlanShape(0, 0, 1, dist.get_world_size(), 1)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    sizes = {TRAIN: len(data[0]), TEST: len(data[1])}
    prefix = FrozenPrefix(model, sizes) if freezes else None
    loop = PlainLoop(ddp, model, args, shape, dist.get_rank(), data, prefix)
    loop.run()
    return loop.history


def run_pipe(model: nn.Sequential, args: argparse.Namespace) -> pt.report.History:
    """Train with the pipeline that ``--baseline-pipe`` names.

    It is called as ``attr(model, num_stages=K, chunks=M)`` and returns the module to
    call; that module must train the parameters of `model` itself.

    Raises:
        ValueError: the name has no colon, or more than one rank was started.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise ValueError(
            "--baseline-pipe: expected one process, got "
            f"{os.environ['WORLD_SIZE']}: every one would train the whole pipeline"
        )
    factory = load_factory("--baseline-pipe", str(args.baseline_pipe))
    chunks = args.microbatches or 4 * args.slots
    data = load_split()
    start = time.perf_counter()
    pipe = factory(model, num_stages=args.slots, chunks=chunks)
    shape = pt.report.PlanShape(0, 0, args.slots, 1, chunks)
    loop = PlainLoop(pipe, model, args, shape, 0, data)
    loop.run()
    loop.history.total_seconds = time.perf_counter() - start
    return loop.history
