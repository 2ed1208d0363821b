"""One rank of a run that loses ranks at random times: trains, and logs what it does.

The run is that of `small_run`, but longer. What the rank is doing stands in a small
mapped file, so that whoever strikes from outside can say what was hit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import mmap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pipetransformer as pt
from faults.small_run import (
    BATCH,
    FREEZE_EVERY,
    PREPARE_STEPS,
    STEPS,
    Deadlines,
    SmallSet,
    engine_hash,
    small_engine,
)
from harness.forked import Log
from harness.private import model_of
from pipetransformer.autodp.meeting import Meeting
from pipetransformer.loop.coordinator import Coordinator
from pipetransformer.recovery.retrying import RetriedCalls
from pipetransformer.report import Phases
from pipetransformer.report.clock import Clock
from pipetransformer.transformation import phases as transformation
from pipetransformer.transformation import rewire
from pipetransformer.transformation.attempts import Changes

WORLD_SIZE = 4
FREEZES = (0, 5, 6, 0, 3, 6, 0, 0)  # one entry per epoch; down and up
EPOCHS = len(FREEZES)
EVALUATION_ROWS = 21
STEP_S = 0.04  # of each batch and evaluation, so that there is time to be struck
PLACE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Kind:
    """What distinguishes undisturbed runs.

    Attributes:
        stages: K, so that R begins as ``WORLD_SIZE / K``.
        between: Where plans change: between "epochs" or "batches", or there after
            being prepared "ahead".
    """

    stages: int
    between: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{WORLD_SIZE // self.stages} x {self.stages}, {self.between}"


KINDS = tuple(Kind(k, b) for k in (1, 2) for b in ("epochs", "batches", "ahead"))


class Place:
    """What this rank is doing now, in a file that outlives it.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"starting".ljust(PLACE_BYTES))
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), PLACE_BYTES)
        self._open: list[str] = []

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Be there inside the ``with`` block."""
        self._open.append(name)
        self._tell()
        try:
            yield
        finally:
            self._open.pop()
            self._tell()

    def _tell(self) -> None:
        name = "/".join(self._open[-3:]) or "user code"
        self._bytes[:] = name.encode()[:PLACE_BYTES].ljust(PLACE_BYTES)

    def follow(self, owner: Any) -> None:
        """Follow a class whose ``phase(name)`` is a context manager."""
        inner, place = owner.phase, self

        @contextlib.contextmanager
        def phase(clock: Any, name: str) -> Iterator[None]:
            with place.at(name), inner(clock, name):
                yield

        owner.phase = phase


def place_of(folder: Path, rank: int) -> str:
    """Return what a rank is doing, or did last."""
    path = folder / f"rank-{rank}.place"
    return path.read_bytes().decode().strip() if path.exists() else "starting"


def mark_of(weights: Iterable[Tensor]) -> list[float]:
    """Return two sums over all weights, by which two states are told apart.

    States whose weights differ by rounding differ in these by as little.
    """
    flat = torch.cat([w.detach().double().flatten() for w in weights])
    ramp = torch.linspace(-1, 1, len(flat), dtype=torch.float64)
    return [float(flat @ ramp), float(flat @ flat)]


def number_of(epoch: int, batch: int) -> int:
    """Return the optimizer steps done after a batch."""
    return epoch * STEPS + batch + 1


def run_rank(
    rank: int, folder: Path, kind: Kind, deadlines: Deadlines, hang_s: float
) -> None:
    """Train to the end; the last line of the log is the outcome."""
    log = Log(folder / f"rank-{rank}.jsonl")
    place = Place(folder / f"rank-{rank}.place")
    place.follow(Clock)
    place.follow(Phases)
    _watch(log)
    with open(folder / f"rank-{rank}.stacks", "w") as stacks:
        faulthandler.dump_traceback_later(hang_s, file=stacks)
        engine = small_engine(
            WORLD_SIZE,
            autodp=deadlines.config(on_peer_failure="continue"),
            num_stages=kind.stages,
            freezes=FREEZES,
            folder=str(folder / "checkpoints"),
            freeze_every=FREEZE_EVERY if kind.between == "batches" else None,
            prepare_steps=PREPARE_STEPS if kind.between == "ahead" else 0,
        )
        log.write("outcome", **_outcome(engine, log, folder / f"rank-{rank}.pt"))
        faulthandler.cancel_dump_traceback_later()


def _watch(log: Log) -> None:
    """Log when this rank joins, leads and holds the state, and what it survives."""
    begin, conclude, go_on = (
        Coordinator.first_plan,
        Changes._conclude,
        RetriedCalls._go_on,
    )
    move, join = rewire.move, Meeting._join

    def joined(self: Meeting, *args: Any) -> None:
        join(self, *args)
        log.write("joined")

    def began(self: Coordinator, *args: Any) -> None:
        log.write("first plan", lead=self.is_lead)
        begin(self, *args)

    def concluded(self: Changes, *args: Any, **options: Any) -> Any:
        outcome = conclude(self, *args, **options)
        run, drives = self._run, outcome.replica is not None
        number = run.in_force.plan_epoch
        log.write("plan", number=number, drives=drives, lead=run.is_lead)
        return outcome

    def moved(run: Any, group: Any, source: int, receivers: Any, *rest: Any) -> int:
        if run.info.rank in receivers:
            log.write("receives")
        return move(run, group, source, receivers, *rest)

    def gone_on(self: RetriedCalls, failure: pt.PeerFailure, *args: Any) -> bool:
        plane = self._run.plane
        log.write("failed", generation=plane.generation, text=str(failure))
        result = go_on(self, failure, *args)
        log.write("went on", generation=plane.generation, members=plane.members)
        return result

    replacements: list[tuple[Any, str, Any]] = [
        (Meeting, "_join", joined),
        (Coordinator, "first_plan", began),
        (Changes, "_conclude", concluded),
        (transformation, "move", moved),
        (RetriedCalls, "_go_on", gone_on),
    ]
    for owner, name, function in replacements:
        setattr(owner, name, function)


def _outcome(engine: pt.PipeTransformer, log: Log, weights: Path) -> dict[str, Any]:
    try:
        with engine:
            _train(engine, log)
    except pt.PeerFailure as failure:
        return {
            "ended": "PeerFailure",
            "rank": failure.rank,
            "phase": failure.phase,
            "text": str(failure),
        }
    torch.save([p.detach() for p in model_of(engine).parameters()], weights)
    history = engine.history.to_json()
    return {"ended": "finished", "lead": engine.is_main, "history": history}


def _train(engine: pt.PipeTransformer, log: Log) -> None:
    train_set, test_set = SmallSet(), SmallSet(EVALUATION_ROWS, seed=2)

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(STEP_S)
        return (outputs.argmax(1) == targets).double()

    engine.prepare(train_set, BATCH)
    for epoch in engine.epochs(EPOCHS):
        for batch in engine.batches(train_set, BATCH):
            time.sleep(STEP_S)
            engine.step(batch)
            log.write(
                "step",
                step=number_of(epoch, batch.index),
                ids=batch.ids.tolist(),
                hash=engine_hash(engine),
                mark=mark_of(model_of(engine).parameters()),
            )
        engine.evaluate(test_set, {"accuracy": metric})
