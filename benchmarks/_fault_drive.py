"""Runs one case: starts the ranks, wakes what was only paused, collects the logs."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _fault_case import Boundary, Case, Policy
from _fault_worker import run_rank
from _forked import Ranks
from _small_run import Deadlines, state_hash
from torch import Tensor

from pipetransformer import checkpoint

POLL_S = 0.02
PAUSE_S = 0.7
HANG_S = 45.0
WAKE_S = 25.0
STACKS_S = 3.0  # until the ranks that hang have written where

Lines = list[dict[str, Any]]


@dataclasses.dataclass
class Trace:
    """What a run left behind.

    Attributes:
        logs: Lines of each rank.
        errors: Traceback of each rank that ended with an error of its own.
        hung: Ranks that had not ended by the deadline, with the stacks they had.
        woken: Whether the victim, stopped and woken after the others' end, ended.
        woken_at: When that was, on the logs' clock; infinite where nobody was.
        checkpoints: Step and hash of each checkpoint file; None where it does not load.
        weights: Last weights of each rank that finished.
    """

    logs: list[Lines]
    errors: list[str]
    hung: dict[int, str]
    woken: bool | None
    woken_at: float
    checkpoints: dict[str, tuple[int, str] | None]
    weights: dict[int, list[Tensor]]

    def strikes(self) -> Lines:
        """Return the lines of faults that happened."""
        return [line for log in self.logs for line in log if line["kind"] == "strike"]

    def outcome(self, rank: int) -> dict[str, Any] | None:
        """Return how a rank ended; None if it could not say."""
        found = [line for line in self.logs[rank] if line["kind"] == "outcome"]
        return found[-1] if found else None

    def steps(self, rank: int) -> Lines:
        """Return the steps of a rank in the order in which it made them."""
        return [line for line in self.logs[rank] if line["kind"] == "step"]


def run_case(
    case: Case | None,
    between: Boundary,
    world_size: int,
    policy: Policy,
    deadlines: Deadlines,
    *,
    hang_s: float = HANG_S,
) -> Trace:
    """Run a case, or without one an undisturbed run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args = (case, between, world_size, policy, deadlines, hang_s)
        own_store = case is None or case.own_store
        with Ranks(run_rank, world_size, folder, *args, own_store=own_store) as ranks:
            hung = _supervise(ranks, case, hang_s)
            woken, woken_at = None, math.inf
            if case is not None and case.fault == "SIGSTOP" and not hung:
                woken_at = time.monotonic()
                woken = _wake(ranks, case)
        return Trace(
            logs=ranks.logs(),
            errors=ranks.errors(),
            hung=hung,
            woken=woken,
            woken_at=woken_at,
            checkpoints=_checkpoints(folder / "checkpoints"),
            weights=_weights(folder, world_size),
        )


def _supervise(ranks: Ranks, case: Case | None, hang_s: float) -> dict[int, str]:
    """Wait for the survivors; wake what is to be paused only."""
    end, strike_at = time.monotonic() + hang_s, None
    stopped = case is not None and case.fault == "SIGSTOP"
    paused = case is not None and case.fault in ("paused", "store paused")
    waited = {
        rank: process
        for rank, process in enumerate(ranks.processes)
        if case is None or not stopped or rank != case.victim
    }
    while time.monotonic() < end:
        running = {r: p for r, p in waited.items() if p.is_alive()}
        if not running:
            return {}
        if paused and case is not None:
            strike_at = strike_at or _struck(ranks, case)
            if strike_at is not None and time.monotonic() > strike_at + PAUSE_S:
                os.kill(_victim_pid(ranks, case), signal.SIGCONT)
                paused = False
        time.sleep(POLL_S)
    time.sleep(STACKS_S)
    return {rank: _stacks(ranks.folder, rank) for rank in running}


def _struck(ranks: Ranks, case: Case) -> float | None:
    lines = ranks.logs()[case.rank]
    return next((line["at"] for line in lines if line["kind"] == "strike"), None)


def _victim_pid(ranks: Ranks, case: Case) -> int:
    victim = case.victim
    process = ranks.store if victim is None else ranks.processes[victim]
    pid: int = process.pid
    return pid


def _wake(ranks: Ranks, case: Case) -> bool:
    """Continue the victim, whose run is over; it must end by itself."""
    if case.victim is None or _struck(ranks, case) is None:
        return False
    process = ranks.processes[case.victim]
    os.kill(process.pid, signal.SIGCONT)
    process.join(WAKE_S)
    return not process.is_alive()


def _stacks(folder: Path, rank: int) -> str:
    path = folder / f"rank-{rank}.stacks"
    return path.read_text() if path.exists() else ""


def _checkpoints(folder: Path) -> dict[str, tuple[int, str] | None]:
    found: dict[str, tuple[int, str] | None] = {}
    for path in sorted(folder.glob("step-*.pt")):
        try:
            content = checkpoint.read(path)
        except ValueError:
            found[path.name] = None
            continue
        weights, moments = content["model"].values(), content["optimizer_tensors"]
        found[path.name] = content["progress"]["step"], state_hash(weights, moments)
    return found


def _weights(folder: Path, world_size: int) -> dict[int, list[Tensor]]:
    paths = {rank: folder / f"rank-{rank}.pt" for rank in range(world_size)}
    return {
        rank: torch.load(path, weights_only=True)
        for rank, path in paths.items()
        if path.exists()
    }
