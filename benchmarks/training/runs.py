"""Runs one system of Table 1 as its own job and reads back what it did."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.common import Repeat, run_child
from training.systems import SYSTEMS
from training.work import TRAINING, work_of

WALL_TIME = "wall time"  # s
TRAINING_TIME = "training time"  # s: the wall time without the evaluations
ACCURACY = "final accuracy"  # %
WORKER = Path(__file__).with_name("table1_worker.py")


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        system: Name of the system.
        slots: CPU slots, one process each.
        seed: Of the fresh head and of the sample order.
        flags: Further flags of the worker.
        baseline_pipe: ``MODULE:ATTR`` of a pipeline to run in the system's place.
        timeout_s: Longest time the run may take.
    """

    system: str
    slots: int
    seed: int = 0
    flags: tuple[str, ...] = ()
    baseline_pipe: str | None = None
    timeout_s: float = 900.0

    @property
    def processes(self) -> int:
        """One per slot; a lone pipeline of another package needs just its own."""
        alone = self.baseline_pipe is not None or SYSTEMS[self.system].one_process
        return 1 if alone else self.slots

    @property
    def threads(self) -> int:
        """Threads that a process computes with."""
        return self.slots if SYSTEMS[self.system].one_process else 1

    def command(self, out: Path) -> list[str]:
        """Return the launcher's command line; the run writes into `out`."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.processes}", str(WORKER)]
        command += [f"--system={self.system}", f"--slots={self.slots}"]
        command += [f"--seed={self.seed}", f"--out={out}", *self.flags]
        if self.baseline_pipe is not None:
            command.append(f"--baseline-pipe={self.baseline_pipe}")
        return command


@dataclass(frozen=True)
class Result(Repeat):
    """What one run took and did.

    Its `sample` times the whole job, its start included; its metrics are
    ``wall time`` in s, from opening to closing the engine, ``training time`` in s, the
    same without the evaluations, and ``final accuracy`` in %.

    Attributes:
        seed: Of the job.
        summary: The engine's summary (`pipetransformer.report.write_summary`).
        work: Work of all ranks, in forwards of one block for one row.
        training_work: Without that of the evaluations.
    """

    seed: int
    summary: dict[str, Any] = field(repr=False)
    work: int
    training_work: int

    @property
    def wall_s(self) -> float:
        """Wall seconds from opening to closing the engine, every pause included."""
        return self.metrics[WALL_TIME]


def run_job(job: Job, folder: Path, name: str) -> Result:
    """Run a job to its end.

    Raises:
        RunFailed: it failed or took too long; names the log.
    """
    out = folder / name
    out.mkdir(parents=True, exist_ok=True)
    # Slots are cores: a process that computes with more threads takes another's.
    env = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    log = out / "run.log"
    sample = run_child(job.command(out), timeout_s=job.timeout_s, env=env, log=log)
    summary = json.loads((out / "summary.json").read_text())
    rows = [
        json.loads((out / f"work-{rank}.json").read_text())
        for rank in range(job.processes)
    ]
    metrics = {
        WALL_TIME: float(summary["total_seconds"]),
        TRAINING_TIME: training_seconds(summary),
        ACCURACY: 100.0 * float(summary["final_accuracy"]),
    }
    work, training = work_of(rows), work_of(rows, TRAINING)
    return Result(sample, metrics, job.seed, summary, work, training)


def training_seconds(summary: Mapping[str, Any]) -> float:
    """Return a run's seconds without those that its lead spent in evaluations."""
    evaluating = sum(
        seconds
        for phase, seconds in summary["phase_seconds"].items()
        if phase.split("/")[0] == "evaluate"
    )
    return float(summary["total_seconds"] - evaluating)


def pace_without_freezing(repeat: Repeat) -> float | None:
    """Return the seconds of a run's mean epoch without evaluation; all do equal work.

    For `judge`; None for what is no run.
    """
    if not isinstance(repeat, Result):
        return None
    seconds = [float(epoch["seconds"]) for epoch in repeat.summary["epochs"]]
    return statistics.fmean(seconds)
