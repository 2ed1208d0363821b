"""Runs of a model whose transformations are timed: the demo's, and a large one."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipetransformer as pt
from harness.forked import Log, Ranks
from pipetransformer.planner import Transition

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from vit_digits import build_vit, freeze_units  # noqa: E402  # in examples/


@dataclasses.dataclass(frozen=True)
class Load:
    """A model and how it is trained between two changes.

    Attributes:
        name: For tables.
        width: Of the tokens.
        heads: Of the attention.
        world_size: Processes.
        cycle: Blocks frozen in each epoch of the cycle, over and over.
        rows: Samples per batch.
        steps: Batches per epoch.
        prepare_steps: As in `Config`.
    """

    name: str
    width: int
    heads: int
    world_size: int
    cycle: tuple[int, ...]
    rows: int
    steps: int
    prepare_steps: int = 0

    def model(self) -> nn.Sequential:
        """Return the vision transformer of 12 blocks, equal on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: nn.Sequential = build_vit(
                blocks=12, width=self.width, heads=self.heads
            )
        return model


# K is the world size, and less when fewer layers are left to train.
DEMO = Load("demo model", 64, 4, 4, (0, 11, 12, 11), rows=32, steps=6)
AHEAD = dataclasses.replace(DEMO, name="demo model, prepared ahead", prepare_steps=2)
LARGE = Load("100 M parameters", 832, 13, 2, (0, 12), rows=8, steps=2)
TINY = Load("tiny", 16, 2, 2, (0, 12), rows=8, steps=2)


class Images(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random images of 8 by 8 in ten classes."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, 8, generator=generator)
        self.y = torch.randint(0, 10, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@dataclasses.dataclass(frozen=True)
class Change:
    """One transformation.

    Attributes:
        name: Stages x replicas before and after.
        pause_s: From the end of an epoch's work to the first batch of the next.
        phases: Seconds of each phase on the lead, in their order.
        joins: Whether new replicas got weights and moments.
        predicted_s: Of the pause with what the first step takes more.
    """

    name: str
    pause_s: float
    phases: dict[str, float]
    joins: bool
    predicted_s: float

    @property
    def whole_s(self) -> float:
        """The pause with what the first step takes more than the others."""
        return self.pause_s + self.phases.get("first_step", 0.0)


@dataclasses.dataclass(frozen=True)
class PauseRun:
    """What one run of a `Load` showed.

    Attributes:
        parameters: Of the model.
        step_s: Median step of the unfrozen plan.
        changes: All transformations.
    """

    parameters: int
    step_s: float
    changes: list[Change]


def run_rank(rank: int, folder: Path, load: Load, cycles: int) -> None:
    """Train `cycles` cycles and log steps and records."""
    log = Log(folder / f"rank-{rank}.jsonl")
    freezes = [*load.cycle * cycles, load.cycle[0]]
    model, data = load.model(), Images(load.rows * load.steps)
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(freezes),
        units=freeze_units(model),
        config=pt.Config(
            prepare_steps=load.prepare_steps,
            plan=pt.PlanConfig(
                num_stages=load.world_size,
                num_microbatches=2,
                reshape="always",
                replicas="all",
            ),
            autodp=pt.AutoDPConfig(
                heartbeat_timeout=timedelta(seconds=30),
                protocol_timeout=timedelta(seconds=60),
            ),
        ),
    )
    with engine:
        for epoch in engine.epochs(len(freezes)):
            for batch in engine.batches(data, load.rows):
                began = time.perf_counter()
                engine.step(batch)
                log.write("step", epoch=epoch, seconds=time.perf_counter() - began)
    records = engine.history.to_json()["transformations"]
    log.write("end", parameters=_size(model), records=records)


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def run_load(load: Load, cycles: int, *, timeout_s: float = 500.0) -> PauseRun:
    """Run and read the lead's records.

    Raises:
        RuntimeError: a rank ended with an error, or late.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(run_rank, load.world_size, folder, load, cycles) as ranks:
            end = time.monotonic() + timeout_s
            for process in ranks.processes:
                process.join(max(0.0, end - time.monotonic()))
            logs, errors = ranks.logs(), ranks.errors()
    last: dict[str, Any] = logs[0][-1] if logs[0] else {"kind": "nothing"}
    if any(errors) or last["kind"] != "end":
        raise RuntimeError(f"{load.name}: expected all ranks to end, got {errors}")
    plain = [e for e, units in enumerate(load.cycle * cycles) if units == 0]
    steps = [
        line["seconds"]
        for line in logs[0]
        if line["kind"] == "step" and line["epoch"] in plain
    ]
    changes = [_change(record) for record in last["records"]]
    # The first step of a plan is part of its price, not of the usual step.
    return PauseRun(last["parameters"], statistics.median(steps), changes)


def _change(record: dict[str, Any]) -> Change:
    shapes = [record["from"], record["to"]]
    priced = Transition.from_dict(record["transition"])
    before, after = (f"{s['num_stages']}x{s['num_replicas']}" for s in shapes)
    return Change(
        name=f"{before} -> {after}",
        pause_s=record["pause_seconds"],
        phases=record["phases"],
        joins=shapes[1]["num_replicas"] > shapes[0]["num_replicas"],
        predicted_s=sum(priced.expected_terms_ns.values()) / 1e9,
    )


def by_name(changes: Sequence[Change]) -> dict[str, list[Change]]:
    """Return the changes of each kind, in the order in which kinds appear."""
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(change.name, []).append(change)
    return found
