"""Runs one case: starts the ranks, wakes what was stopped, collects what is left."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from faults.case import Case, Kind, Moment, Policy
from faults.outcomes import PAUSE_S, STARVE_S
from faults.places import small_disk
from faults.small_run import Deadlines, state_hash
from faults.trace import Reference, Saved, Trace
from faults.worker import Job, run_rank
from harness.forked import Ranks
from pipetransformer.checkpoint import format as checkpoint

POLL_S = 0.02
HANG_S = 45.0
WAKE_S = 25.0
STACKS_S = 3.0  # until the ranks that hang have written where
STARVED_OF_S, FED_S = 0.095, 0.005  # 5 % of a core


class SavedStates(Mapping[int, list[Tensor]]):
    """The states after each step that an undisturbed run kept in a folder."""

    def __init__(self, folder: Path) -> None:
        found = folder.glob("state-*.pt")
        self._paths = {int(path.stem.partition("-")[2]): path for path in found}

    def __getitem__(self, step: int) -> list[Tensor]:
        """Read one."""
        return list(torch.load(self._paths[step], weights_only=True))

    def __iter__(self) -> Iterator[int]:
        """Iterate over the steps."""
        return iter(self._paths)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._paths)


def run_undisturbed(
    kind: Kind, policy: Policy, deadlines: Deadlines, folder: Path, hang_s: float
) -> Reference:
    """Run without a fault; `folder` keeps the states after each step.

    Raises:
        ValueError: the run was not in order.
    """
    job = Job(None, kind, Moment(), policy, deadlines, hang_s)
    folder.mkdir(parents=True)
    trace = _run(job, folder, own_store=True)
    return Reference.of(trace, SavedStates(folder), large=kind.large)


def run_case(
    case: Case, moment: Moment, policy: Policy, deadlines: Deadlines, *, hang_s: float
) -> Trace:
    """Run a case.

    Raises:
        subprocess.CalledProcessError: it needs a mount that is not permitted.
    """
    job = Job(case, case.kind, moment, policy, deadlines, hang_s)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if case.fault == "full disk":
            stack.enter_context(small_disk(folder / "checkpoints"))
        return _run(job, folder, own_store=case.own_store)


def _run(job: Job, folder: Path, *, own_store: bool) -> Trace:
    case, world_size = job.case, job.kind.world_size
    with Ranks(run_rank, world_size, folder, job, own_store=own_store) as ranks:
        watch = _Supervisor(ranks, case)
        hung = watch.wait(job.hang_s)
        unwoken = frozenset[int]()
        if case is not None and case.stopped and not hung:
            unwoken = watch.wake_stopped(case)
    newest = checkpoint.newest_valid(folder / "checkpoints")
    return Trace(
        logs=ranks.logs(),
        errors=ranks.errors(),
        hung=hung,
        unwoken=unwoken,
        woken_at=watch.woken_at,
        checkpoints=_checkpoints(folder / "checkpoints"),
        newest=newest[0].name if newest is not None else None,
        weights=_weights(folder, world_size),
    )


class _Supervisor:
    """Waits for the survivors, and does to the victim what only others can do.

    Args:
        ranks: The processes.
        case: The fault; None in an undisturbed run.

    Attributes:
        woken_at: When a stopped rank was woken; infinite until then.
    """

    def __init__(self, ranks: Ranks, case: Case | None) -> None:
        self._ranks = ranks
        self._case = case
        self._treated = case is None
        self.woken_at = math.inf

    def wait(self, hang_s: float) -> dict[int, str]:
        """Return the stacks of the ranks that had not ended after so long."""
        end, case, ranks = time.monotonic() + hang_s, self._case, self._ranks
        stopped = case.stopped if case is not None else ()
        waited = {r: p for r, p in enumerate(ranks.processes) if r not in stopped}
        while time.monotonic() < end:
            running = {r: p for r, p in waited.items() if p.is_alive()}
            if not running:
                return {}
            if case is not None and not self._treated:
                self._treat(case)
            time.sleep(POLL_S)
        time.sleep(STACKS_S)
        return {rank: _stacks(ranks.folder, rank) for rank in running}

    def wake_stopped(self, case: Case) -> frozenset[int]:
        """Wake who is still stopped when all others have ended.

        Returns:
            The ranks that did not then end by themselves.
        """
        if self._struck(case) is None:
            return case.stopped
        self.woken_at = time.monotonic()
        for rank in case.stopped:
            os.kill(self._ranks.processes[rank].pid, signal.SIGCONT)
        for rank in case.stopped:
            self._ranks.processes[rank].join(WAKE_S)
        return frozenset(
            rank for rank in case.stopped if self._ranks.processes[rank].is_alive()
        )

    def _treat(self, case: Case) -> None:
        """Wake a victim that is to be woken, or begin to starve it, when it is time."""
        struck_at = self._struck(case)
        if struck_at is None:
            return
        now = time.monotonic()
        if case.fault in ("paused", "store paused"):
            if now > struck_at + PAUSE_S:
                os.kill(self._victim_pid(case), signal.SIGCONT)
                self._treated = True
        elif case.fault == "woken":
            if self._removed(case, struck_at):
                self.woken_at = now
                os.kill(self._victim_pid(case), signal.SIGCONT)
                self._treated = True
        else:
            if case.fault == "starved":
                args = self._victim_pid(case), STARVE_S
                threading.Thread(target=_starve, args=args, daemon=True).start()
            self._treated = True

    def _struck(self, case: Case) -> float | None:
        lines = self._ranks.logs()[case.rank]
        return next((line["at"] for line in lines if line["kind"] == "strike"), None)

    def _removed(self, case: Case, struck_at: float) -> bool:
        """Whether another rank has gone over to a plan without the victim."""
        return any(
            line["kind"] == "change"
            and line["committed"]
            and line["at"] > struck_at
            and case.rank not in line["active"]
            for rank, log in enumerate(self._ranks.logs())
            for line in log
            if rank != case.rank
        )

    def _victim_pid(self, case: Case) -> int:
        victims, ranks = case.victims, self._ranks
        process = ranks.processes[victims[0]] if victims else ranks.store
        pid: int = process.pid
        return pid


def _starve(pid: int, seconds: float) -> None:
    """Let a process run for 5 ms in every 100, as under a quota of 5 % of a core."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STARVED_OF_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(FED_S)


def _stacks(folder: Path, rank: int) -> str:
    path = folder / f"rank-{rank}.stacks"
    return path.read_text() if path.exists() else ""


def _checkpoints(folder: Path) -> dict[str, Saved | None]:
    found: dict[str, Saved | None] = {}
    for path in sorted(folder.glob("step-*.pt")):
        try:
            content = checkpoint.read(path)
        except ValueError:
            found[path.name] = None
            continue
        tensors = [*content["model"].values(), *content["optimizer_tensors"]]
        scheduler = content["joined"]["scheduler"]
        counters = {**content["progress"], "scheduler": scheduler}
        step, bits = counters["step"], state_hash(tensors, [])
        found[path.name] = Saved(step, bits, tensors, counters)
    return found


def _weights(folder: Path, world_size: int) -> dict[int, list[Tensor]]:
    paths = {rank: folder / f"rank-{rank}.pt" for rank in range(world_size)}
    return {
        rank: torch.load(path, weights_only=True)
        for rank, path in paths.items()
        if path.exists()
    }
