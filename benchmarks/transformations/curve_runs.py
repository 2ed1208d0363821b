"""Runs whose loss curves are compared: elastic, and alone under one plan."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipetransformer as pt
from harness.forked import Log, Ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from harness.private import model_of
from vit_digits import (  # noqa: E402  # in examples/
    Digits,
    build_vit,
    freeze_units,
    load_split,
)

BATCH = 32
TIMEOUT_S = 560.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        world_size: Processes; K is that number where enough layers are left.
        freezes: Blocks frozen in each epoch.
        samples: Of the training set.
        double: float64, else float32.
        blocks: Of the vision transformer.
        width: Of its tokens.
        nudge: Whether every initial weight is off by one unit in its last place.
    """

    world_size: int
    freezes: tuple[int, ...]
    samples: int
    double: bool
    blocks: int = 12
    width: int = 64
    nudge: bool = False

    def model(self) -> nn.Sequential:
        """Return the model, equal on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: nn.Sequential = build_vit(
                blocks=self.blocks, width=self.width, heads=4
            )
            if self.double:
                model = model.double()
            if self.nudge:
                for parameter in model.parameters():
                    up = torch.rand_like(parameter) < 0.5
                    far = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
                    parameter.data = torch.nextafter(parameter.data, far)
        return model


def data(job: Job) -> tuple[Digits, Digits]:
    """Return training and test set in the job's precision."""
    train, test = (part.tensors() for part in load_split())
    kept = [(x[: job.samples], y[: job.samples]) for x, y in (train, test)]
    if job.double:
        kept = [(x.double(), y) for x, y in kept]
    return Digits(*kept[0]), Digits(*kept[1])


@dataclasses.dataclass(frozen=True)
class CurveRun:
    """What a run left behind.

    Attributes:
        losses: Training loss of each optimizer step, over all replicas.
        evaluations: Test loss (after a change, at the end of the epoch) per epoch.
        shapes: Stages x replicas of each epoch.
        states: Per epoch and active rank: hashes at its begin and its end.
        ids: Samples of each epoch, in the order of steps.
        step_ids: Samples of each step, sorted.
        weights: The lead's last ones.
    """

    losses: list[float]
    evaluations: list[tuple[float, float]]
    shapes: list[str]
    states: list[dict[int, tuple[dict[str, str], dict[str, str]]]]
    ids: list[list[int]]
    step_ids: list[list[int]]
    weights: list[Tensor]


def run_rank(rank: int, folder: Path, job: Job) -> None:
    """Train and log losses, ids and hashes."""
    log = Log(folder / f"rank-{rank}.jsonl")
    model, (train_set, test_set) = job.model(), data(job)
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 40, 0.9),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(list(job.freezes)),
        units=freeze_units(model),
        config=_config(job),
    )
    with engine:
        engine.prepare(train_set, BATCH)
        for epoch in engine.epochs(len(job.freezes)):
            after = engine.evaluate(test_set)["loss"]
            begin = state(engine)
            for batch in engine.batches(train_set, BATCH):
                loss = float(engine.step(batch))
                log.write("step", loss=loss, epoch=epoch, ids=batch.ids.tolist())
            end = state(engine)
            before = engine.evaluate(test_set)["loss"]
            plan = engine.plan
            shape = f"{plan.num_stages}x{plan.num_replicas}" if plan else ""
            log.write(
                "epoch", losses=[after, before], begin=begin, end=end, shape=shape
            )
    if rank == 0:
        weights = [p.detach() for p in model_of(engine).parameters()]
        torch.save(weights, folder / "weights.pt")
    log.write("end")


def _config(job: Job) -> pt.Config:
    return pt.Config(
        seed=3,
        plan=pt.PlanConfig(
            num_stages=job.world_size,
            num_microbatches=2,
            reshape="always",
            replicas="all",
        ),
        cache=pt.CacheConfig(enabled=job.world_size > 1),
        autodp=pt.AutoDPConfig(
            heartbeat_timeout=timedelta(seconds=30),
            protocol_timeout=timedelta(seconds=60),
        ),
    )


def state(engine: pt.PipeTransformer) -> dict[str, str] | None:
    """Hash weights, moments and rates of an active rank; None on a standby."""
    if engine.plan is None:
        return None
    tree = engine.optimizer.state_dict()
    moments = [
        value
        for index in sorted(tree["state"])
        for _, value in sorted(tree["state"][index].items())
    ]
    rates = [float(group["lr"]) for group in tree["param_groups"]]
    scheduler = engine.scheduler
    done = scheduler.last_epoch if scheduler is not None else -1
    return {
        "weights": _hash(model_of(engine).parameters()),
        "moments": _hash(moments),
        "rates": f"{rates} after {done} steps",
    }


def _hash(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def run_job(job: Job) -> CurveRun:
    """Run a job on its processes.

    Raises:
        RuntimeError: a rank ended with an error, or late.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(run_rank, job.world_size, folder, job) as ranks:
            end = time.monotonic() + TIMEOUT_S
            for process in ranks.processes:
                process.join(max(0.0, end - time.monotonic()))
            logs, errors = ranks.logs(), ranks.errors()
        if any(errors) or any(not log or log[-1]["kind"] != "end" for log in logs):
            raise RuntimeError(f"{job}: expected all ranks to end, got {errors}")
        weights = torch.load(folder / "weights.pt", weights_only=True)
    return _curve(logs, weights)


def _curve(logs: list[list[dict[str, Any]]], weights: list[Tensor]) -> CurveRun:
    steps: dict[int, list[dict[str, Any]]] = {}
    for log in logs:
        numbers: dict[int, int] = {}
        for line in (x for x in log if x["kind"] == "step"):
            place = numbers.get(line["epoch"], 0)
            numbers[line["epoch"]] = place + 1
            steps.setdefault((line["epoch"] << 20) + place, []).append(line)
    ordered = [steps[key] for key in sorted(steps)]
    epochs = [[x for x in log if x["kind"] == "epoch"] for log in logs]
    lead = epochs[0]
    count = len(lead)
    return CurveRun(
        losses=[
            sum(x["loss"] * len(x["ids"]) for x in parts)
            / sum(len(x["ids"]) for x in parts)
            for parts in ordered
        ],
        evaluations=[(x["losses"][0], x["losses"][1]) for x in lead],
        shapes=[x["shape"] for x in lead],
        states=[
            {
                rank: (found[e]["begin"], found[e]["end"])
                for rank, found in enumerate(epochs)
                if found[e]["begin"] is not None
            }
            for e in range(count)
        ],
        ids=[
            [i for parts in ordered for x in parts if x["epoch"] == e for i in x["ids"]]
            for e in range(count)
        ],
        step_ids=[sorted(i for x in parts for i in x["ids"]) for parts in ordered],
        weights=weights,
    )
