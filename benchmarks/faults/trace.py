"""What a run left behind, and what an undisturbed one did step by step; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from faults.small_run import STEPS

Line = dict[str, Any]
Lines = list[Line]
LARGE_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class Saved:
    """The state in a checkpoint.

    Attributes:
        step: Optimizer steps done.
        hash: Of its bits, as the ranks log it.
        tensors: Weights and moments, in their order.
        counters: What is counted alongside them, as the ranks log it with a step.
    """

    step: int
    hash: str
    tensors: list[Tensor]
    counters: dict[str, Any]


@dataclasses.dataclass
class Trace:
    """What a run left behind.

    Attributes:
        logs: Lines of each rank.
        errors: Traceback of each rank that ended with an error of its own.
        hung: Ranks that had not ended by the deadline, with the stacks they had.
        unwoken: Stopped ranks that did not end when they were woken.
        woken_at: When the victim was woken, after its removal or after the others'
            end, on the logs' clock; infinite where nobody was.
        checkpoints: By name; None where one does not load.
        newest: The checkpoint that a resumed run would take; None: there is none.
        weights: Last weights of each rank that finished.
    """

    logs: list[Lines]
    errors: list[str]
    hung: dict[int, str] = dataclasses.field(default_factory=dict)
    unwoken: frozenset[int] = frozenset()
    woken_at: float = math.inf
    checkpoints: dict[str, Saved | None] = dataclasses.field(default_factory=dict)
    newest: str | None = None
    weights: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.logs))

    def lines(self, rank: int, kind: str) -> Lines:
        """Return a rank's lines of one kind, in the order in which it wrote them."""
        return [line for line in self.logs[rank] if line["kind"] == kind]

    def strikes(self) -> Lines:
        """Return the lines of faults that happened."""
        return [line for rank in self.ranks for line in self.lines(rank, "strike")]

    @property
    def struck_at(self) -> float:
        """When the first fault happened; infinite if none did."""
        return min((line["at"] for line in self.strikes()), default=math.inf)

    @property
    def replanned_at(self) -> float:
        """When the first change of plan after the fault was carried out."""
        changes = [line for rank in self.ranks for line in self.lines(rank, "change")]
        times = [line["at"] for line in changes if line["committed"]]
        return min((at for at in times if at > self.struck_at), default=math.inf)

    def outcome(self, rank: int) -> Line | None:
        """Return how a rank ended; None if it could not say."""
        found = self.lines(rank, "outcome")
        return found[-1] if found else None

    def steps(self, rank: int) -> Lines:
        """Return the steps of a rank in the order in which it made them."""
        return self.lines(rank, "step")

    def drives(self, rank: int) -> bool:
        """Whether a rank drives a pipeline under the last plan that it went over to."""
        changes = [c for c in self.lines(rank, "change") if c["committed"]]
        return bool(changes) and rank in changes[-1]["active"]

    def holds(self, rank: int) -> bool:
        """Whether a rank could go on alone: it drives, and knows the pass so far."""
        if not self.drives(rank):
            return False
        last = [c for c in self.lines(rank, "change") if c["committed"]][-1]
        told = any(line["at"] >= last["at"] for line in self.lines(rank, "told"))
        return rank not in last["owed"] or told

    def last_step(self, rank: int) -> int:
        """Return the last step that a rank has completed; 0 if none."""
        return max(map(number_of, self.steps(rank)), default=0)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The undisturbed run of as many ranks.

    Attributes:
        hashes: Hash of the state after each optimizer step, from 0.
        ids: Samples of each step, sorted.
        metrics: What each epoch's evaluation gave.
        states: Weights and moments after each step, from 0.
        counters: What was counted after each step, from 1: as the ranks logged it,
            and as its checkpoint has it.
        move_s: The longest time that each rank took to give or get the state.
    """

    hashes: dict[int, str]
    ids: dict[int, list[int]]
    metrics: dict[int, dict[str, float]]
    states: Mapping[int, list[Tensor]]
    counters: dict[int, list[dict[str, Any]]]
    move_s: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def last(self) -> int:
        """The number of its steps."""
        return max(self.hashes)

    @classmethod
    def of(
        cls, trace: Trace, states: Mapping[int, list[Tensor]], *, large: bool = False
    ) -> Reference:
        """Read it off a run's logs.

        Args:
            trace: What it left behind.
            states: As the attribute.
            large: Some rank must have been given 100 MB at once.

        Raises:
            ValueError: the run itself was not in order.
        """
        hashes: dict[int, str] = {}
        counters: dict[int, list[dict[str, Any]]] = {}
        metrics: dict[int, dict[str, float]] = {}
        moved = 0
        for rank in trace.ranks:
            ended = trace.outcome(rank)
            if ended is None or ended["ended"] != "finished":
                text = trace.errors[rank] or ended
                raise ValueError(f"rank {rank}: expected the end, got {text}")
            hashes.setdefault(0, ended["first_hash"])
            for line in trace.steps(rank):
                number = number_of(line)
                if hashes.setdefault(number, line["hash"]) != line["hash"]:
                    raise ValueError(f"step {number}: replicas differ")
                found = counters.setdefault(number, [line["counters"]])
                if found != [line["counters"]]:
                    raise ValueError(f"step {number}: replicas count differently")
            changes = ended["history"]["transformations"]
            moved = max([moved, *(change["moved_bytes"] for change in changes)])
            if ended["lead"]:
                epochs = ended["history"]["epochs"]
                metrics = {record["epoch"]: record["metrics"] for record in epochs}
        if large and moved < LARGE_BYTES:
            raise ValueError(f"moved: expected {LARGE_BYTES} bytes, got {moved}")
        for saved in trace.checkpoints.values():
            if saved is None or saved.step not in counters:
                raise ValueError(f"checkpoint: expected one of a step, got {saved}")
            counters[saved.step].append(saved.counters)
        ids = {
            n: sorted(i for part in p.values() for i in part)
            for n, p in last_attempts(trace).items()
        }
        moves = {
            rank: max(
                (line["seconds"] for line in trace.lines(rank, "moved")), default=0
            )
            for rank in trace.ranks
        }
        return cls(hashes, ids, metrics, states, counters, moves)


def number_of(line: Line) -> int:
    """Return the optimizer steps done after a logged step, or share of one."""
    number: int = line["epoch"] * STEPS + line["batch"] + 1
    return number


def last_attempts(
    trace: Trace, lost: Collection[int] = ()
) -> dict[int, dict[int, list[int]]]:
    """Return per step the samples that each rank brought into its last attempt.

    A step that a loss breaks off is taken again under the survivors' plan, with other
    shares; a rank that is lost brought its share in if the others did not repeat it.

    Args:
        trace: Of the run.
        lost: Ranks that no longer count once they were woken.
    """
    found: dict[int, dict[int, list[int]]] = {}
    plans: dict[int, int] = {}
    for rank in trace.ranks:
        for line in trace.lines(rank, "share"):
            number, plan = number_of(line), line["plan"]
            ignored = rank in lost and line["at"] > trace.woken_at
            if ignored or plan < plans.get(number, plan):
                continue
            if plan > plans.get(number, -1):
                plans[number], found[number] = plan, {}
            found[number].setdefault(rank, []).extend(line["ids"])
    return found
