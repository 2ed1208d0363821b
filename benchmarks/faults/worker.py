"""One rank of a run that a fault strikes: trains, logs, and says how it ended."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pipetransformer as pt
from faults.case import Case, Kind, Moment, Policy
from faults.points import Planted, Striker, after, before
from faults.small_run import (
    BATCH,
    FREEZE_EVERY,
    PREPARE_STEPS,
    STEPS,
    WIDTH,
    Deadlines,
    SmallSet,
    engine_hash,
    engine_state,
    small_engine,
    state_hash,
)
from harness.forked import Log
from harness.private import model_of, run_of
from pipetransformer import _C
from pipetransformer.data import Batch
from pipetransformer.loop import step as training
from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.phases import Outcome

EVALUATION_ROWS = 21
# Forced under "continue": the others must be able to go on without one.
STAGES = {2: 1, 3: 2, 4: 2}
MID_PASS = 2  # batches before the evaluation within a pass
SLOWED_S = 0.04  # of each batch and metric, so that others have to wait
STARVING_S = 0.7  # of each batch, so that the run outlasts the fault
LARGE_WIDTH = 528  # weights and moments: 107 MB


@dataclasses.dataclass(frozen=True)
class Job:
    """What all ranks of a run are told.

    Attributes:
        case: The fault; None in an undisturbed run, whose every state is kept.
        kind: The run.
        moment: When the fault strikes.
        policy: What the engine does after a failure.
        deadlines: Of the engine.
        hang_s: After so long a rank writes where it is.
    """

    case: Case | None
    kind: Kind
    moment: Moment
    policy: Policy
    deadlines: Deadlines
    hang_s: float


def run_rank(rank: int, folder: Path, job: Job) -> None:
    """Run the script of every case; the last line of the log is the outcome."""
    log, case, kind = Log(folder / f"rank-{rank}.jsonl"), job.case, job.kind
    log.write("begin", pid=os.getpid())
    with open(folder / f"rank-{rank}.stacks", "w") as stacks:
        faulthandler.dump_traceback_later(job.hang_s, file=stacks)
        _watch(log, rank)
        striker = Striker(case, job.moment, rank, folder, log, job.deadlines)
        point = case.point if case is not None else ""
        engine = small_engine(
            kind.world_size,
            autodp=job.deadlines.config(
                on_peer_failure=job.policy,
                cached_groups=0 if point == "in retire" else 4,
            ),
            num_stages=STAGES[kind.world_size] if job.policy == "continue" else None,
            freezes=kind.freezes,
            folder=str(folder / "checkpoints"),
            freeze_every=FREEZE_EVERY if kind.between == "batches" else None,
            prepare_steps=PREPARE_STEPS if kind.between == "ahead" else 0,
            halfway=lambda: striker.at("in optimizer step"),
            width=LARGE_WIDTH if kind.large else WIDTH,
        )
        striker.watch_backward(model_of(engine))
        starves = case is not None and case.fault == "starved"
        slowed_s = STARVING_S if starves else SLOWED_S
        states = folder if case is None else None
        script = Script(engine, striker, log, states, kind, slowed_s)
        if rank == 0:
            script.keep(0, list(model_of(engine).parameters()))
        log.write("outcome", **_outcome(script, folder / f"rank-{rank}.pt"))
        faulthandler.cancel_dump_traceback_later()


def _watch(log: Log, rank: int) -> None:
    """Log what this rank brings into a step, its changes of plan, and transfers."""
    begun = [0.0]

    def shares(run: Run, _: Replica, __: Any, batch: Any, *___: Any) -> None:
        if isinstance(batch, Batch):
            place = {"epoch": run.state.epoch, "batch": batch.index}
            number, ids = run.in_force.plan_epoch, batch.ids.tolist()
            log.write("share", **place, plan=number, ids=ids)

    def changed(outcome: Outcome) -> None:
        log.write(
            "change",
            plan=outcome.proposal.plan_epoch,
            committed=outcome.committed,
            active=list(outcome.proposal.layout.active),
            culprits=list(outcome.culprits),
            # Within a pass they must also be told what was counted of it.
            owed=list(
                outcome.proposal.receivers
                if outcome.proposal.position is not None
                else ()
            ),
        )

    def moving(*_: Any) -> None:
        begun[0] = time.monotonic()
        log.write("moving")

    before(training, "step", shares)
    after(Changes, "_conclude", changed)
    for name in ("hand_over", "take_over"):
        after(OpenPass, name, lambda _: log.write("told"))
    before(_C.autodp, "broadcast_tensors", moving)
    after(
        _C.autodp,
        "broadcast_tensors",
        lambda _: log.write("moved", seconds=time.monotonic() - begun[0]),
    )


def _outcome(script: Script, weights: Path) -> dict[str, Any]:
    engine = script.engine
    model = model_of(engine)
    first = state_hash(model.parameters(), [])
    try:
        with engine:
            script.train()
    except pt.PeerFailure as failure:
        return {
            "ended": "PeerFailure",
            "rank": failure.rank,
            "phase": failure.phase,
            "text": str(failure),
        }
    except OSError as error:
        return {"ended": "OSError", "text": str(error)}
    except RuntimeError as error:
        # The engine says what it was doing; the user's error is the cause.
        if not isinstance(error, Planted) and not isinstance(error.__cause__, Planted):
            raise
        return {"ended": "Planted", "text": str(error)}
    torch.save([p.detach() for p in model.parameters()], weights)
    return {
        "ended": "finished",
        "history": engine.history.to_json(),
        "lead": script.leads,
        "first_hash": first,
    }


def _counters(engine: pt.PipeTransformer) -> dict[str, Any]:
    """Return what a checkpoint of this moment counts, its scheduler included."""
    state = run_of(engine).state
    scheduler = state.scheduler.state_dict() if state.scheduler is not None else None
    return {**state.progress(), "scheduler": scheduler}


class Script:
    """The user's script: epochs, each with a pass and two evaluations.

    Args:
        engine: Of this rank.
        striker: Told where the script is.
        log: Told what was done.
        states: The folder for the state after each step; None: it is not kept.
        kind: The run.
        slowed_s: How long to sleep before each batch.
    """

    def __init__(
        self,
        engine: pt.PipeTransformer,
        striker: Striker,
        log: Log,
        states: Path | None,
        kind: Kind,
        slowed_s: float,
    ) -> None:
        self.engine = engine
        self._striker = striker
        self._log = log
        self._states = states
        self._kind = kind
        self._slowed_s = slowed_s
        self.leads = False

    def train(self) -> None:
        """Run it."""
        engine, striker, log = self.engine, self._striker, self._log
        train_set, test_set = SmallSet(), SmallSet(EVALUATION_ROWS, seed=2)
        if not engine.is_main:
            striker.standing_by("in profile")
        engine.prepare(train_set, BATCH)
        for epoch in engine.epochs(len(self._kind.freezes)):
            striker.in_epoch(epoch)
            active = engine.plan is not None
            log.write("epoch", epoch=epoch, active=active)
            if not active:
                striker.standing_by("standing by")
            striker.closing = False
            for batch in engine.batches(train_set, BATCH):
                time.sleep(self._slowed_s)
                engine.step(batch)
                place = {"epoch": epoch, "batch": batch.index}
                made = {"hash": engine_hash(engine), "counters": _counters(engine)}
                log.write("step", **place, **made)
                if engine.is_main:
                    self.keep(epoch * STEPS + batch.index + 1, engine_state(engine))
                if batch.index == MID_PASS:
                    self._evaluate(test_set, "in evaluation within a pass")
                striker.closing = batch.index == STEPS - 1
            self._evaluate(test_set, "in evaluation")
            self.leads = engine.is_main
            log.write("epoch end", epoch=epoch, lead=self.leads)

    def keep(self, number: int, tensors: list[Tensor]) -> None:
        """Keep the state after a step, in an undisturbed run."""
        if self._states is not None:
            path = self._states / f"state-{number}.pt"
            torch.save([tensor.detach() for tensor in tensors], path)

    def _evaluate(self, test_set: SmallSet, point: str) -> None:
        """Evaluate with a metric that may strike; a standby strikes while it waits."""
        striker = self._striker

        def metric(outputs: Tensor, targets: Tensor) -> Tensor:
            striker.at(point)
            time.sleep(SLOWED_S)
            return (outputs.argmax(1) == targets).double()

        if self.engine.plan is None:
            striker.standing_by(point)
        self.engine.evaluate(test_set, {"accuracy": metric})
