"""Judges runs that lost ranks by what they left behind; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from _loss_job import Strike, Trace
from _loss_worker import EPOCHS
from _small_run import SAMPLES, STEPS

# Another number of replicas adds up in another order: a few bits of 53 in each of 40
# steps, in sums of a thousand weights; see METRICS.md.
TOLERANCE = 1e-9
WENT_ON = "the others went on"
STATE_LOST = "the state was lost with it"
NOT_OPEN = "all ended: the run had not begun"
OVER = "the run was over before it was missed"
ENDED = "all ended though the state was held"


@dataclasses.dataclass(frozen=True)
class Loss:
    """One strike, and what came of it.

    Attributes:
        strike: The strike.
        outcome: `WENT_ON`, `STATE_LOST`, `NOT_OPEN`, `OVER` or `ENDED`.
        seconds: Until the last survivor had gone on, or ended; None where it was over.
    """

    strike: Strike
    outcome: str
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one run.

    Attributes:
        trace: The run.
        losses: One per strike.
        problems: What is not as promised; empty when all is.
        fenced: Ranks that were not struck but too slow, and rightly ended.
    """

    trace: Trace
    losses: tuple[Loss, ...]
    problems: tuple[str, ...]
    fenced: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reference:
    """An undisturbed run.

    Attributes:
        marks: Of the weights after each optimizer step, from 1.
        ids: Samples of each step, sorted.
        weights: After the last step.
    """

    marks: dict[int, list[float]]
    ids: dict[int, list[int]]
    weights: list[torch.Tensor]

    @classmethod
    def of(cls, trace: Trace) -> Reference:
        """Read it off a run's logs.

        Raises:
            ValueError: the run itself was not in order.
        """
        marks: dict[int, list[float]] = {}
        ids: dict[int, list[int]] = {}
        for rank, log in enumerate(trace.logs):
            outcome = trace.outcome(rank)
            if outcome is None or outcome["ended"] != "finished":
                raise ValueError(f"rank {rank}: expected the end, got {outcome}")
            for line in log:
                if line["kind"] == "step":
                    marks[line["step"]] = line["mark"]
                    ids[line["step"]] = sorted(
                        [*ids.get(line["step"], []), *line["ids"]]
                    )
        if sorted(marks) != list(range(1, EPOCHS * STEPS + 1)):
            raise ValueError(
                f"steps: expected all of {EPOCHS} epochs, got {sorted(marks)}"
            )
        return cls(marks, ids, trace.weights[_drivers(trace)[0]])


def judge(trace: Trace, reference: Reference) -> Verdict:
    """Return what a run showed."""
    problems = [f"hung ranks {sorted(trace.hung)}"] if trace.hung else []
    problems += [f"rank {r} slept on after it was woken" for r in trace.sleepers]
    for rank, error in enumerate(trace.errors):
        if error:
            problems.append(f"rank {rank}: {error.strip().splitlines()[-1]}")
    outcomes = {rank: trace.outcome(rank) for rank in trace.survivors}
    problems += [f"rank {r}: no outcome" for r, o in outcomes.items() if o is None]
    ended = {r: o for r, o in outcomes.items() if o and o["ended"] == "PeerFailure"}
    fenced = tuple(r for r, o in ended.items() if o["phase"] == "fenced")
    finishes = any(
        o is not None and o["ended"] == "finished" for o in outcomes.values()
    )
    held = [rank for rank in trace.survivors if holds_state(trace, rank)]
    for rank, outcome in ended.items():
        if rank in fenced and len(fenced) < len(outcomes):
            continue  # the others went on without it
        if finishes or held:
            problems.append(
                f"rank {rank} ended though {held} held it: {outcome['text']}"
            )
    for check in (_weights, _states, _samples, _records, _files):
        problems += list(check(trace, reference))[:3]
    end = _end(trace, finishes, bool(held))
    losses = tuple(_loss(trace, strike, end) for strike in trace.strikes)
    return Verdict(trace, losses, tuple(problems), fenced)


def holds_state(trace: Trace, rank: int) -> bool:
    """Tell from a rank's log whether it could give others the training state.

    Rank 0 has it from the beginning; who receives it has it once it has trained on,
    for only then it was told what had been counted of the pass.
    """
    holds = receives = False
    for line in trace.logs[rank]:
        if line["kind"] == "first plan":
            holds = bool(line["lead"])
        elif line["kind"] == "receives":
            holds, receives = False, True
        elif line["kind"] == "plan":
            holds = bool(line["drives"]) and not receives
            receives = receives and bool(line["drives"])
        elif line["kind"] == "step":
            holds, receives = True, False
    return holds


def _drivers(trace: Trace) -> list[int]:
    """Return the ranks that finished and drove a pipeline at the end."""
    return [
        rank
        for rank in sorted(trace.weights)
        if (plans := trace.lines(rank, "plan")) and plans[-1]["drives"]
    ]


def _far(mark: list[float], other: list[float]) -> bool:
    pairs = zip(mark, other, strict=True)
    return not all(abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in pairs)


def _weights(trace: Trace, reference: Reference) -> Iterator[str]:
    """Replicas finish with equal weights, and with those of the undisturbed run."""
    drivers = [rank for rank in _drivers(trace) if rank in trace.survivors]
    if not drivers:
        finished = [r for r in trace.survivors if r in trace.weights]
        if finished:
            yield f"ranks {finished} finished, and none of them drove"
        return
    first = trace.weights[drivers[0]]
    for rank in drivers[1:]:
        if not all(map(torch.equal, first, trace.weights[rank])):
            yield f"ranks {drivers[0]} and {rank} finished with different weights"
    pairs = zip(first, reference.weights, strict=True)
    far = max(float((a - b).abs().max()) for a, b in pairs)
    if not far <= TOLERANCE:
        yield f"weights: {far:.2g} from the undisturbed run"


def _states(trace: Trace, reference: Reference) -> Iterator[str]:
    """No two survivors train on with other bits, and each step is the reference's."""
    seen: dict[int, str] = {}
    for rank in trace.survivors:
        for line in trace.lines(rank, "step"):
            step = line["step"]
            if _far(line["mark"], reference.marks[step]):
                yield f"step {step}: rank {rank} is off the undisturbed run"
            if seen.setdefault(step, line["hash"]) != line["hash"]:
                yield f"step {step}: ranks with different weights"
    for strike in trace.strikes:
        later = [
            s for s in trace.lines(strike.rank, "step") if s["at"] > strike.woken_at
        ]
        if len(later) > 1:
            yield f"rank {strike.rank} made {len(later)} steps after it was woken"


def _samples(trace: Trace, reference: Reference) -> Iterator[str]:
    """Each step takes the samples of the undisturbed run's, each once.

    But for those about a loss: what the lost rank did last it may not have logged, and
    what is done again has other shares than the batches that the script holds.
    """
    drivers = [r for r in trace.survivors if trace.outcome(r) is not None]
    broken = {step for strike in trace.strikes for step in _steps_about(trace, strike)}
    done = {s["step"] for r in drivers for s in trace.lines(r, "step")}
    for step in sorted(done - broken):
        ids = sorted(
            i
            for rank in range(len(trace.logs))
            for line in trace.lines(rank, "step")
            if line["step"] == step
            for i in line["ids"]
        )
        if ids != reference.ids[step]:
            yield f"step {step}: expected samples {reference.ids[step]}, got {ids}"


def _steps_about(trace: Trace, strike: Strike) -> range:
    """Return the steps that were under way from a strike until the run had gone on."""
    until = max(_went_on(trace, strike), default=strike.at)
    steps = [s for r in range(len(trace.logs)) for s in trace.lines(r, "step")]
    first = max((s["step"] for s in steps if s["at"] <= strike.at), default=0)
    last = max((s["step"] for s in steps if s["at"] <= until), default=0)
    return range(first, last + 3)


def _records(trace: Trace, _: Reference) -> Iterator[str]:
    """Every record of every finished rank counts each sample once; the lead has all."""
    for rank in trace.survivors:
        outcome = trace.outcome(rank)
        if outcome is None or outcome["ended"] != "finished":
            continue
        records = outcome["history"]["epochs"]
        for record in records:
            if (record["samples"], record["unique_samples"]) != (SAMPLES, SAMPLES):
                yield (
                    f"rank {rank}, epoch {record['epoch']}: expected {SAMPLES} samples "
                    f"once, got {record['unique_samples']} in {record['samples']}"
                )
        epochs = [record["epoch"] for record in records]
        leads = any(line["lead"] for line in trace.lines(rank, "end"))
        if leads and epochs != list(range(EPOCHS)):
            yield f"rank {rank}: expected records of {EPOCHS} epochs, got {epochs}"


def _files(trace: Trace, reference: Reference) -> Iterator[str]:
    """Every checkpoint is a state of the undisturbed run, and none is missing.

    But one for each rank that was lost: it may have led, and died before it wrote.
    """
    steps = set()
    for name, found in trace.checkpoints.items():
        if found is None:
            yield f"{name} does not load"
            continue
        step, mark = found
        steps.add(step)
        if step > 0 and _far(mark, reference.marks[step]):
            yield f"{name}: not the state of step {step}"
    if any(rank in trace.weights for rank in trace.survivors):
        missing = [s for s in range(STEPS, EPOCHS * STEPS + 1, STEPS) if s not in steps]
        if len(missing) > len(trace.strikes):
            yield f"checkpoints: expected one per epoch, got none of steps {missing}"


def _end(trace: Trace, finishes: bool, held: bool) -> str:
    if finishes:
        return OVER
    if held:
        return ENDED
    begun = any(trace.lines(rank, "first plan") for rank in range(len(trace.logs)))
    return STATE_LOST if begun else NOT_OPEN


def _went_on(trace: Trace, strike: Strike) -> list[float]:
    """Return when each survivor was in the first generation without the rank."""
    found: list[float] = []
    for rank in trace.survivors:
        lines = trace.lines(rank, "went on")
        without = [line["at"] for line in lines if strike.rank not in line["members"]]
        found += without[:1]
    return found


def _loss(trace: Trace, strike: Strike, end: str) -> Loss:
    on = _went_on(trace, strike)
    if on:
        return Loss(strike, WENT_ON, max(on) - strike.at)
    ends = [o["at"] for r in trace.survivors if (o := trace.outcome(r)) is not None]
    seconds = None if end == OVER or not ends else max(ends) - strike.at
    return Loss(strike, end, seconds)
