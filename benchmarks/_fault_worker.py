"""One rank of a run that a fault strikes: trains, logs, and says how it ended."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from typing import Any

import torch
from _fault_case import Boundary, Case, Policy
from _fault_points import Planted, Striker
from _forked import Log
from _small_run import (
    BATCH,
    FREEZE_EVERY,
    FREEZES,
    PREPARE_STEPS,
    STEPS,
    Deadlines,
    SmallSet,
    engine_hash,
    small_engine,
)
from torch import Tensor

import pipetransformer as pt

EVALUATION_ROWS = 21
# Forced under "continue": the others must be able to go on without one.
STAGES = {2: 1, 3: 2, 4: 2}
MID_PASS = 2  # batches before the evaluation within a pass
SLOWED_S = 0.04  # of each batch and metric, so that others have to wait


def run_rank(
    rank: int,
    folder: Path,
    case: Case | None,
    between: Boundary,
    world_size: int,
    policy: Policy,
    deadlines: Deadlines,
    hang_s: float,
) -> None:
    """Run the script of every case; the last line of the log is the outcome."""
    log = Log(folder / f"rank-{rank}.jsonl")
    with open(folder / f"rank-{rank}.stacks", "w") as stacks:
        faulthandler.dump_traceback_later(hang_s, file=stacks)
        striker = Striker(case, rank, log, late_s=1.5 * deadlines.protocol)
        point = case.point if case is not None else ""
        engine = small_engine(
            world_size,
            autodp=deadlines.config(
                on_peer_failure=policy, cached_groups=0 if point == "in retire" else 4
            ),
            num_stages=STAGES[world_size] if policy == "continue" else None,
            freezes=FREEZES[world_size],
            folder=str(folder / "checkpoints"),
            freeze_every=FREEZE_EVERY if between == "batches" else None,
            prepare_steps=PREPARE_STEPS if between == "ahead" else 0,
            halfway=lambda: striker.at("in optimizer step"),
        )
        striker.watch_backward(engine._recipe.model)
        log.write(
            "outcome", **_outcome(engine, striker, log, folder / f"rank-{rank}.pt")
        )
        faulthandler.cancel_dump_traceback_later()


def _outcome(
    engine: pt.PipeTransformer, striker: Striker, log: Log, weights: Path
) -> dict[str, Any]:
    try:
        with engine:
            _train(engine, striker, log)
    except pt.PeerFailure as failure:
        return {
            "ended": "PeerFailure",
            "rank": failure.rank,
            "phase": failure.phase,
            "text": str(failure),
        }
    except RuntimeError as error:
        # The engine says what it was doing; the user's error is the cause.
        if not isinstance(error, Planted) and not isinstance(error.__cause__, Planted):
            raise
        return {"ended": "Planted", "text": str(error)}
    if engine.history.epochs:
        torch.save([p.detach() for p in engine._recipe.model.parameters()], weights)
    return {"ended": "finished", "history": engine.history.to_json()}


def _train(engine: pt.PipeTransformer, striker: Striker, log: Log) -> None:
    train_set, test_set = SmallSet(), SmallSet(EVALUATION_ROWS, seed=2)
    epochs = len(FREEZES[engine.history.world_size])
    if not engine.is_main:
        striker.standing_by("in profile")
    engine.prepare(train_set, BATCH)
    for epoch in engine.epochs(epochs):
        striker.in_epoch(epoch)
        active = engine.plan is not None
        log.write("epoch", epoch=epoch, active=active)
        if not active:
            striker.standing_by("standing by")
        striker.closing = False
        for batch in engine.batches(train_set, BATCH):
            time.sleep(SLOWED_S)
            engine.step(batch)
            log.write(
                "step",
                epoch=epoch,
                batch=batch.index,
                ids=batch.ids.tolist(),
                hash=engine_hash(engine),
            )
            if batch.index == MID_PASS:
                evaluate(engine, test_set, striker, "in evaluation within a pass")
            striker.closing = batch.index == STEPS - 1
        evaluate(engine, test_set, striker, "in evaluation")


def evaluate(
    engine: pt.PipeTransformer, test_set: SmallSet, striker: Striker, point: str
) -> None:
    """Evaluate with a metric that may strike; a standby strikes while it waits."""

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        striker.at(point)
        time.sleep(SLOWED_S)
        return (outputs.argmax(1) == targets).double()

    if engine.plan is None:
        striker.standing_by(point)
    engine.evaluate(test_set, {"accuracy": metric})
