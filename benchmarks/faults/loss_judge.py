"""Judges runs that lost ranks by what they left behind; pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from faults.loss_job import Strike, Trace
from faults.loss_worker import EPOCHS, WORLD_SIZE
from faults.outcomes import STUCK_CLOSE_S, Blame
from faults.small_run import SAMPLES, STEPS, Deadlines

# Another number of replicas adds up in another order: a few bits of 53 in each of 40
# steps, in sums of a thousand weights; see METRICS.md.
TOLERANCE = 1e-9
SLACK_S = 2.0  # beyond what the deadlines promise, for a busy machine
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
        seconds: Until the last survivor had gone on, or ended.
        limit_s: What the deadlines promise for that, and slack.
    """

    strike: Strike
    outcome: str
    seconds: float
    limit_s: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one run.

    Attributes:
        trace: The run.
        losses: One per strike.
        problems: What is not as promised; empty when all is.
        fenced: Ranks that were not struck, but that the others went on without.
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


def judge(
    trace: Trace, reference: Reference, deadlines: Deadlines, slack_s: float = SLACK_S
) -> Verdict:
    """Return what a run showed.

    Args:
        trace: What it left behind.
        reference: The undisturbed run of its kind.
        deadlines: Of its engines.
        slack_s: What a loss may take beyond them.
    """
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
    losses = tuple(
        _loss(trace, strike, end, deadlines, slack_s) for strike in trace.strikes
    )
    problems += [*_blames(trace, fenced, end), *_lateness(losses)]
    problems += _wakings(trace, losses)
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
    drivers = _drivers(trace)
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
    """Every record of every finished rank counts each sample once; the lead has all.

    Somebody leads at the end, unless who led was lost so late that nobody missed it.
    """
    outcomes = {rank: trace.outcome(rank) for rank in trace.survivors}
    finished = {
        rank: outcome
        for rank, outcome in outcomes.items()
        if outcome is not None and outcome["ended"] == "finished"
    }
    lost = [s for s in trace.strikes if not _went_on(trace, s)]
    led = any(_leads(trace, s.rank, s.at) for s in lost)
    if finished and not led and not any(o["lead"] for o in finished.values()):
        yield f"ranks {sorted(finished)} finished, and none of them led"
    for rank, outcome in finished.items():
        records = outcome["history"]["epochs"]
        for record in records:
            if (record["samples"], record["unique_samples"]) != (SAMPLES, SAMPLES):
                yield (
                    f"rank {rank}, epoch {record['epoch']}: expected {SAMPLES} samples "
                    f"once, got {record['unique_samples']} in {record['samples']}"
                )
        epochs = [record["epoch"] for record in records]
        if outcome["lead"] and epochs != list(range(EPOCHS)):
            yield f"rank {rank}: expected records of {EPOCHS} epochs, got {epochs}"


def _files(trace: Trace, reference: Reference) -> Iterator[str]:
    """Every checkpoint is a state of the undisturbed run, and none is missing.

    But that of an epoch's end at which the lead was lost: maybe before it wrote.
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
        ends = range(STEPS, EPOCHS * STEPS + 1, STEPS)
        missing = [s for s in ends if s not in steps and not _lost_lead(trace, s)]
        if missing:
            yield f"checkpoints: expected one per epoch, got none of steps {missing}"


def _lost_lead(trace: Trace, step: int) -> bool:
    """Tell whether the lead was lost between a step and the next one of the others."""
    made = [s for r in range(len(trace.logs)) for s in trace.lines(r, "step")]
    after = [s for r in trace.survivors for s in trace.lines(r, "step")]
    first = min((s["at"] for s in made if s["step"] == step), default=math.inf)
    last = min((s["at"] for s in after if s["step"] > step), default=math.inf)
    return any(
        first < strike.at < last and _leads(trace, strike.rank, strike.at)
        for strike in trace.strikes
    )


def _leads(trace: Trace, rank: int, at: float) -> bool:
    """Tell whether a rank led at a time, as the last plan before it said."""
    lines = [*trace.lines(rank, "first plan"), *trace.lines(rank, "plan")]
    before = [line["lead"] for line in lines if line["at"] <= at]
    return bool(before and before[-1])


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


def _loss(
    trace: Trace, strike: Strike, end: str, deadlines: Deadlines, slack_s: float
) -> Loss:
    on = _went_on(trace, strike)
    ends = [o["at"] for r in trace.survivors if (o := trace.outcome(r)) is not None]
    outcome, until = (WENT_ON, max(on)) if on else (end, max(ends, default=math.inf))
    promised = _promised_s(trace, strike, outcome, until, deadlines)
    seconds = max(0.0, until - strike.at)  # the end itself takes a moment
    return Loss(strike, outcome, seconds, promised + slack_s)


# -- how long it takes ---------------------------------------------------------


def _promised_s(
    trace: Trace, strike: Strike, outcome: str, until: float, deadlines: Deadlines
) -> float:
    """Return how long after a strike the last survivor may go on, or end.

    A silent rank is found after the heartbeat timeout and one interval, and the roll
    waits as long again for who neither answers nor beats. Each further rank that is
    lost before they have gone on may cost them both again.
    """
    silence, roll = 1.1 * deadlines.heartbeat, deadlines.heartbeat
    if outcome == NOT_OPEN:
        return _promised_opening_s(trace, strike, deadlines) + STUCK_CLOSE_S
    others = sum(
        other.at <= until and max(_went_on(trace, other), default=until) > strike.at
        for other in trace.strikes
        if other is not strike
    )
    own = {WENT_ON: silence + roll, OVER: silence}
    return own.get(outcome, silence + roll + STUCK_CLOSE_S) + others * (silence + roll)


def _promised_opening_s(trace: Trace, strike: Strike, deadlines: Deadlines) -> float:
    """Return the same for ranks that still wait for each other.

    Each that has joined is watched by the one before it that has; of who is lost
    before that nobody knows, and they wait as long as for one that never starts.
    """
    joined = {each.rank: _had_joined(trace, each) for each in trace.strikes}
    ring = [rank for rank in range(WORLD_SIZE) if joined.get(rank, True)]
    watched = [
        each.at
        for each in trace.strikes
        if joined[each.rank] and ring[ring.index(each.rank) - 1] not in joined
    ]
    if not watched:
        return deadlines.store
    return min(watched) - strike.at + 1.1 * deadlines.heartbeat


def _had_joined(trace: Trace, strike: Strike) -> bool:
    return any(line["at"] <= strike.at for line in trace.lines(strike.rank, "joined"))


def _lateness(losses: tuple[Loss, ...]) -> Iterator[str]:
    for loss in losses:
        if loss.seconds > loss.limit_s:
            yield (
                f"loss of rank {loss.strike.rank}: {loss.outcome} after "
                f"{loss.seconds:.1f} s, expected at most {loss.limit_s:.1f} s"
            )


# -- whom they blame -----------------------------------------------------------


def _blames(trace: Trace, fenced: tuple[int, ...], end: str) -> Iterator[str]:
    """Survivors that end blame a rank that was lost by then, and say how they know."""
    for rank in trace.survivors:
        outcome = trace.outcome(rank)
        if outcome is None or outcome["ended"] != "PeerFailure":
            continue
        own = (Blame(frozenset({rank}), frozenset({"fenced"})),)
        others = _right_blames(trace, outcome["at"], fenced, end)
        yield from _wrong_blame(rank, outcome, own if rank in fenced else others)


def _right_blames(
    trace: Trace, at: float, fenced: tuple[int, ...], end: str
) -> tuple[Blame, ...]:
    """Return them; nobody is named where several were lost at once, or never joined."""
    strikes = [strike for strike in trace.strikes if strike.at <= at]
    lost = frozenset[int]([*(strike.rank for strike in strikes), *fenced])
    if end != NOT_OPEN:  # told in the rendezvous after the last loss
        text = "ranks {} lost; training state: expected a survivor that holds it"
        return tuple(
            Blame(
                frozenset({gone[0] if count == 1 else None}),
                frozenset({"recovery"}),
                text.format(list(gone)),
            )
            for count in range(1, len(lost) + 1)
            for gone in itertools.combinations(sorted(lost), count)
        )
    named, connect = frozenset[int | None](lost), frozenset({"connect"})
    absent = sorted(s.rank for s in strikes if not _had_joined(trace, s))
    unknown = Blame(frozenset({None}), connect, f"ranks {absent} did not join")
    return (
        Blame(named, connect, "no heartbeat after it had joined"),
        Blame(named, frozenset({"heartbeat"}), "no heartbeat"),
        *((unknown,) if absent else ()),
    )


def _wrong_blame(
    rank: int, outcome: dict[str, Any], right: tuple[Blame, ...]
) -> Iterator[str]:
    blamed, phase, text = outcome["rank"], outcome["phase"], outcome["text"]
    if not any(blame.covers(blamed, phase, text) for blame in right):
        who = "nobody" if blamed is None else f"rank {blamed}"
        yield f"rank {rank}: blames {who}, phase {phase!r}: {text}"


def _wakings(trace: Trace, losses: tuple[Loss, ...]) -> Iterator[str]:
    """A stopped rank that is missed fails when it is woken: it was taken for dead."""
    own = frozenset({"fenced", "heartbeat"})
    for loss in losses:
        rank = loss.strike.rank
        if loss.strike.signal != "SIGSTOP" or loss.outcome == OVER:
            continue
        outcome = trace.outcome(rank)
        if outcome is None or outcome["ended"] != "PeerFailure":
            got = None if outcome is None else outcome["ended"]
            yield f"rank {rank}: expected PeerFailure when woken, got {got}"
        elif loss.outcome == WENT_ON:
            yield from _wrong_blame(rank, outcome, (Blame(frozenset({rank}), own),))
