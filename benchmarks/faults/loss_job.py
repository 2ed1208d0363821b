"""Runs that lose ranks: draws when and whom, strikes, wakes, collects what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faults.loss_worker import KINDS, WORLD_SIZE, Kind, mark_of, place_of, run_rank
from faults.small_run import Deadlines
from harness.forked import Ranks, read_log
from pipetransformer.checkpoint import format as checkpoint

POLL_S = 0.01
WAKE_S = 25.0
STACKS_S = 3.0  # until the ranks that hang have written where
SPREAD_S = 1.5  # between the survivors' going on and the next strike
SIGNALS = ("SIGKILL", "SIGSTOP")

Lines = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Blow:
    """One signal to one rank.

    Attributes:
        after: What is waited for first: the first "plan", the survivors' going on
            after the blow before ("loss"), or nothing after the "start" of the
            processes or the blow before ("nothing").
        delay_s: Then this long.
        choice: Which of the ranks that are left, as a share of them.
        signal: "SIGKILL" or "SIGSTOP".
        wakes: A stopped rank is woken while the others train on, and not after their
            end.
    """

    after: str
    delay_s: float
    choice: float
    signal: str
    wakes: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    """One run and the blows that it takes.

    Attributes:
        number: Of the run.
        kind: Of the run.
        blows: At most one fewer than there are ranks.
    """

    number: int
    kind: Kind
    blows: tuple[Blow, ...]


@dataclasses.dataclass(frozen=True)
class Strike:
    """A blow that was struck.

    Attributes:
        rank: Whom it hit.
        signal: With what.
        at: When, on the logs' clock.
        place: What the rank was doing.
        woken_at: When it was woken; infinite if it was not.
    """

    rank: int
    signal: str
    at: float
    place: str
    woken_at: float = math.inf


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a run left behind.

    Attributes:
        job: As it was drawn.
        strikes: In the order of time.
        logs: Lines of each rank.
        errors: Traceback of each rank that ended with an error of its own.
        hung: Ranks that had not ended by the deadline, with the stacks they had.
        sleepers: Ranks that were stopped and had not ended long after waking up.
        checkpoints: Step and mark of each checkpoint file; None where it does not load.
        weights: Last weights of each rank that finished.
    """

    job: Job
    strikes: list[Strike]
    logs: list[Lines]
    errors: list[str]
    hung: dict[int, str]
    sleepers: list[int]
    checkpoints: dict[str, tuple[int, list[float]] | None]
    weights: dict[int, list[Tensor]]

    def lines(self, rank: int, kind: str) -> Lines:
        """Return the lines of one kind."""
        return [line for line in self.logs[rank] if line["kind"] == kind]

    def outcome(self, rank: int) -> dict[str, Any] | None:
        """Return how a rank ended; None if it could not say."""
        found = self.lines(rank, "outcome")
        return found[-1] if found else None

    @property
    def survivors(self) -> list[int]:
        """Ranks that were never struck."""
        struck = {strike.rank for strike in self.strikes}
        return [rank for rank in range(len(self.logs)) if rank not in struck]


def draw_job(seed: int, number: int, heartbeat_s: float) -> Job:
    """Draw a run: one or two ranks at a time, until up to three of four are gone.

    Of two at a time the second is struck within one heartbeat timeout. A third of the
    later blows do not wait until the survivors have gone on.
    """
    draw = random.Random(f"{seed}-{number}")
    blows: list[Blow] = []
    wanted = draw.randint(2, WORLD_SIZE - 1)
    while len(blows) < wanted:
        if not blows:
            after = draw.choice(["start", "plan", "plan", "plan", "plan"])
        else:
            after = draw.choice(["loss", "loss", "nothing"])
        longest = heartbeat_s + 1 if after == "nothing" else SPREAD_S
        blows.append(_draw_blow(draw, after, longest))
        if len(blows) < wanted and draw.random() < 1 / 3:
            blows.append(_draw_blow(draw, "nothing", heartbeat_s))
    return Job(number, draw.choice(KINDS), tuple(blows))


def _draw_blow(draw: random.Random, after: str, longest_s: float) -> Blow:
    return Blow(
        after=after,
        delay_s=draw.uniform(0, longest_s),
        choice=draw.random(),
        signal=draw.choice(SIGNALS),
        wakes=draw.random() < 1 / 3,
    )


def run_job(job: Job, deadlines: Deadlines, hang_s: float) -> Trace:
    """Run one job to its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(run_rank, WORLD_SIZE, folder, job.kind, deadlines, hang_s) as ranks:
            driver = _Driver(ranks, job, time.monotonic() + hang_s)
            for blow in job.blows:
                driver.strike(blow)
            hung = driver.wait_for_end()
            sleepers = driver.wake_all()
        return collect(folder, job, driver.strikes, ranks.errors(), hung, sleepers)


def collect(
    folder: Path,
    job: Job,
    strikes: list[Strike],
    errors: list[str],
    hung: dict[int, str],
    sleepers: list[int],
) -> Trace:
    """Read what the ranks of a run have left in its folder."""
    ranks = range(WORLD_SIZE)
    return Trace(
        job=job,
        strikes=strikes,
        logs=[read_log(folder / f"rank-{rank}.jsonl") for rank in ranks],
        errors=errors,
        hung=hung,
        sleepers=sleepers,
        checkpoints=_checkpoints(folder / "checkpoints"),
        weights=_weights(folder),
    )


class _Driver:
    """Strikes the processes of one run, and looks after those that it stopped.

    Args:
        ranks: The processes.
        job: What to do.
        end: A ``time.monotonic()`` at which a rank that still runs hangs.
    """

    def __init__(self, ranks: Ranks, job: Job, end: float) -> None:
        self._ranks = ranks
        self._job = job
        self._end = end
        self._left = list(range(WORLD_SIZE))
        self._to_wake: list[int] = []  # indices of strikes, while others train on
        self.strikes: list[Strike] = []

    def strike(self, blow: Blow) -> None:
        """Strike as drawn; not if the run is over by then."""
        ready = {
            "plan": lambda: all(self._lines(r, "plan") for r in self._left),
            "loss": lambda: not self.strikes or self._gone_on(len(self.strikes) - 1),
        }
        if blow.after in ready:
            self._wait(ready[blow.after])
        resume = time.monotonic() + blow.delay_s
        self._wait(lambda: time.monotonic() >= resume)
        if not self._runs():
            return
        rank = self._left.pop(int(blow.choice * len(self._left)))
        process = self._ranks.processes[rank]
        place, at = place_of(self._folder, rank), time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process.pid, signal.Signals[blow.signal])
        self.strikes.append(Strike(rank, blow.signal, at, place))
        if blow.signal == "SIGSTOP" and blow.wakes:
            self._to_wake.append(len(self.strikes) - 1)

    def wait_for_end(self) -> dict[int, str]:
        """Wait for those that are left; return the stacks of those that hang."""
        self._wait(lambda: False)
        running = [r for r in self._left if self._ranks.processes[r].is_alive()]
        if running:
            time.sleep(STACKS_S)
        return {rank: self._stacks(rank) for rank in running}

    def wake_all(self) -> list[int]:
        """Continue all stopped ranks; return those that do not end by themselves."""
        for index, strike in enumerate(self.strikes):
            if strike.signal == "SIGSTOP" and strike.woken_at == math.inf:
                self._wake(index)
        end = time.monotonic() + WAKE_S
        woken = [s.rank for s in self.strikes if s.signal == "SIGSTOP"]
        for rank in woken:
            self._ranks.processes[rank].join(max(0.0, end - time.monotonic()))
        return [rank for rank in woken if self._ranks.processes[rank].is_alive()]

    @property
    def _folder(self) -> Path:
        return self._ranks.folder

    def _runs(self) -> bool:
        """Tell whether every rank that is left still runs, and another remains."""
        alive = all(self._ranks.processes[r].is_alive() for r in self._left)
        return alive and len(self._left) > 1 and time.monotonic() < self._end

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait for `ready`, or for the end of all ranks that are left."""
        while time.monotonic() < self._end and not ready():
            if not any(self._ranks.processes[r].is_alive() for r in self._left):
                return
            for index in [i for i in self._to_wake if self._gone_on(i)]:
                self._to_wake.remove(index)
                self._wake(index)
            time.sleep(POLL_S)

    def _wake(self, index: int) -> None:
        strike = self.strikes[index]
        with contextlib.suppress(ProcessLookupError):  # it had ended before
            os.kill(self._ranks.processes[strike.rank].pid, signal.SIGCONT)
        self.strikes[index] = dataclasses.replace(strike, woken_at=time.monotonic())

    def _gone_on(self, index: int) -> bool:
        """Tell whether all that are left have gone on without a rank."""
        lost = self.strikes[index].rank
        return all(
            any(lost not in line["members"] for line in self._lines(rank, "went on"))
            for rank in self._left
        )

    def _lines(self, rank: int, kind: str) -> Lines:
        lines = read_log(self._folder / f"rank-{rank}.jsonl")
        return [line for line in lines if line["kind"] == kind]

    def _stacks(self, rank: int) -> str:
        path = self._folder / f"rank-{rank}.stacks"
        return path.read_text() if path.exists() else ""


def _checkpoints(folder: Path) -> dict[str, tuple[int, list[float]] | None]:
    found: dict[str, tuple[int, list[float]] | None] = {}
    for path in sorted(folder.glob("step-*.pt")):
        try:
            content = checkpoint.read(path)
        except ValueError:
            found[path.name] = None
            continue
        weights: Sequence[Tensor] = list(content["model"].values())
        found[path.name] = content["progress"]["step"], mark_of(weights)
    return found


def _weights(folder: Path) -> dict[int, list[Tensor]]:
    paths = {rank: folder / f"rank-{rank}.pt" for rank in range(WORLD_SIZE)}
    return {
        rank: torch.load(path, weights_only=True)
        for rank, path in paths.items()
        if path.exists()
    }
