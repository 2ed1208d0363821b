"""Judges what was trained: states, samples, records and files; pure.

Every rank that finished counts, whatever the policy and however the others ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from faults.case import STORE_LOST, Case
from faults.small_run import SAMPLES, STEPS
from faults.trace import Line, Reference, Saved, Trace, last_attempts, number_of

# Another number of replicas adds up in another order: a few bits of 53 in each of at
# most 20 steps; see METRICS.md.
TOLERANCE = 1e-9
BY_CHANGES = ("pass_nodes", "decided_epoch", "wanted_units", "frozen_units")


def wrong_states(case: Case, trace: Trace, reference: Reference) -> Iterator[str]:
    """Yield where states after a step are not those of the undisturbed run.

    Bit by bit until the plan changes after the fault, and to the end where the fault
    changes no plan; after that ranks must agree, and the end is compared. A lost rank
    knows the old plan alone.
    """
    seen: dict[int, str] = {}
    for rank in trace.ranks:
        before = 0
        for line in trace.steps(rank):
            number, told = number_of(line), f"rank {rank}, step {number_of(line)}"
            if _is_alone(case, trace, rank, line):
                continue
            if number <= before:
                yield f"{told}: done again after step {before}"
            before = number
            if number not in reference.hashes:
                yield f"{told}: expected at most {reference.last} steps"
            elif rank in case.lost or _keeps_bits(case, trace, line):
                if line["hash"] != reference.hashes[number]:
                    yield f"{told}: other bits than in the undisturbed run"
            elif seen.setdefault(number, line["hash"]) != line["hash"]:
                yield f"step {number}: ranks with different weights"


def wrong_weights(case: Case, trace: Trace, reference: Reference) -> Iterator[str]:
    """Yield where ranks finished with other weights than the undisturbed run.

    Those that made the last step hold its state; one that stands by at the end holds
    that of a step not before its own last one.
    """
    finished = [
        rank
        for rank in trace.ranks
        if (trace.outcome(rank) or {}).get("ended") == "finished"
    ]
    at_end: dict[int, list[Tensor]] = {}
    for rank in finished:
        weights = trace.weights.get(rank)
        if weights is None:
            yield f"rank {rank}: finished without weights"
            continue
        last = trace.last_step(rank)
        if last == reference.last:
            at_end[rank] = weights
        far = min(
            distance(weights, state[: len(weights)])
            for state in _states(reference, last, stands_by=not trace.drives(rank))
        )
        if not far <= TOLERANCE:
            yield f"rank {rank}: weights {far:.2g} from those of the undisturbed run"
    if not at_end and not case.stopped.issuperset(finished):
        yield "nobody made the last step"
    first = next(iter(at_end.values()), [])
    for rank, weights in at_end.items():
        if not all(torch.equal(a, b) for a, b in zip(first, weights, strict=True)):
            yield f"rank {rank}: finished with other bits than another replica"


def _states(
    reference: Reference, last: int, *, stands_by: bool
) -> Iterator[list[Tensor]]:
    until = reference.last if stands_by else last
    return (reference.states[n] for n in range(last, until + 1))


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference of an element; infinite if shapes differ."""
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return math.inf
    pairs = zip(found, wanted, strict=True)
    far = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
    return math.inf if any(map(math.isnan, far)) else max(far, default=0.0)


def wrong_samples(case: Case, trace: Trace, reference: Reference) -> Iterator[str]:
    """Yield steps that were not taken with each of their samples once."""
    attempts = last_attempts(trace, case.lost)
    done = {
        number_of(line)
        for rank in trace.ranks
        for line in trace.steps(rank)
        if not _is_alone(case, trace, rank, line)
    }
    if _anybody_finished(case, trace):
        done |= set(range(1, reference.last + 1))
    for number in sorted(done & set(reference.ids)):
        parts, wanted = attempts.get(number, {}), reference.ids[number]
        found = sorted(i for part in parts.values() for i in part)
        if found != wanted:
            yield f"step {number}: expected samples {wanted}, got {found}"


def wrong_records(case: Case, trace: Trace, reference: Reference) -> Iterator[str]:
    """Yield where a finished run's own records are not of the undisturbed run."""
    for rank in trace.ranks:
        outcome = trace.outcome(rank) or {}
        records = outcome.get("history", {}).get("epochs", [])
        epochs = [record["epoch"] for record in records]
        if epochs != sorted(set(epochs)):
            yield f"rank {rank}: expected each epoch's record once, got {epochs}"
        known = list(range(trace.last_step(rank) // STEPS))
        least = known[_first_told(case, trace, rank) :]
        if outcome.get("ended") == "finished" and epochs not in (known, least):
            yield f"rank {rank}: expected the records of {known}, got {epochs}"
        for record in records:
            told = f"rank {rank}, epoch {record['epoch']}"
            if (record["samples"], record["unique_samples"]) != (SAMPLES, SAMPLES):
                yield (
                    f"{told}: expected each of {SAMPLES} samples once, got "
                    f"{record['unique_samples']} in {record['samples']}"
                )
            found, wanted = record["metrics"], reference.metrics.get(record["epoch"])
            for name, value in (wanted or {}).items():
                if not abs(found.get(name, math.inf) - value) <= TOLERANCE:
                    yield f"{told}: {name} {found.get(name)}, expected {value}"


def _first_told(case: Case, trace: Trace, rank: int) -> int:
    """Return the first epoch that a rank must have the record of.

    One that becomes active is told of all before, but not if the lead, who was to
    tell, was lost in that very change of plan.
    """
    made = trace.steps(rank)
    untold = 0 in case.victims and case.change is not None
    if untold and made and made[0]["at"] > trace.struck_at:
        return int(made[0]["epoch"])
    return 0


# -- files ---------------------------------------------------------------------


def wrong_files(case: Case, trace: Trace, reference: Reference) -> Iterator[str]:
    """Yield checkpoints that are damaged, of another state, or missing."""
    alone = {
        (number_of(line), line["hash"])
        for rank in case.lost
        for line in trace.steps(rank)
        if _is_alone(case, trace, rank, line)
    }
    for name, saved in trace.checkpoints.items():
        if saved is None:
            yield f"{name} does not load"
        elif saved.step not in reference.hashes:
            yield f"{name}: step {saved.step} of {reference.last}"
        elif (saved.step, saved.hash) not in alone:
            if _file_keeps_bits(case, trace, saved.step):
                if saved.hash != reference.hashes[saved.step]:
                    yield f"{name}: not the state of step {saved.step}"
            else:
                far = distance(saved.tensors, reference.states[saved.step])
                if not far <= TOLERANCE:
                    yield f"{name}: {far:.2g} from the state of step {saved.step}"
            yield from (
                f"{name}: {text}" for text in _wrong_counts(case, saved, reference)
            )
    steps = {saved.step for saved in trace.checkpoints.values() if saved is not None}
    yield from _wrong_leads(case, trace)
    for step in sorted(_due_epochs(case, trace, reference) - steps):
        yield f"expected a checkpoint of step {step}, got those of {sorted(steps)}"
    due = _due_at_end(case, trace)
    if due is not None and max(steps, default=-1) < due:
        yield f"expected a checkpoint of step {due} or later, got {sorted(steps)}"
    newest = trace.checkpoints.get(trace.newest or "")
    taken = None if newest is None else newest.step
    if taken != max(steps, default=None):
        yield f"resuming takes step {taken}, expected step {max(steps, default=None)}"


def _wrong_counts(case: Case, saved: Saved, reference: Reference) -> Iterator[str]:
    """Yield what a file counts in another way than the undisturbed run.

    What a change of plan sets is that of before or after the change at this step.
    Without a store the policy goes on to want what no change carries out any more.
    """
    at = reference.counters.get(saved.step, [])
    then = [*at, *reference.counters.get(saved.step + 1, [])]
    for name in reference.counters[reference.last][0]:
        if name == "wanted_units" and case.fault in STORE_LOST:
            continue
        wanted = [counted[name] for counted in (then if name in BY_CHANGES else at)]
        if saved.counters.get(name) not in wanted:
            yield f"{name} {saved.counters.get(name)}, expected one of {wanted}"


def _leads(trace: Trace) -> dict[int, set[int]]:
    """Return who led at each end of an epoch that a rank saw, as the ranks say."""
    found: dict[int, set[int]] = {}
    for rank in trace.ranks:
        for line in trace.lines(rank, "epoch end"):
            leads = found.setdefault(line["epoch"], set())
            leads |= {rank} if line["lead"] else set()
    return found


def _wrong_leads(case: Case, trace: Trace) -> Iterator[str]:
    """Yield ends of epochs with two leads, or, of a run that finished, with none."""
    unled = []
    for epoch, leads in sorted(_leads(trace).items()):
        left = sorted(leads - _fallen(case, trace))
        if len(left) > 1:
            yield f"epoch {epoch}: expected one lead, got {left}"
        if not leads:
            unled.append(epoch)
    if _anybody_finished(case, trace) and len(unled) > len(_lost_leads(case, trace)):
        yield f"epochs {unled}: expected a lead, got none"


def _due_epochs(case: Case, trace: Trace, reference: Reference) -> set[int]:
    """Return the steps at epochs' ends that must have been saved.

    Of a run that somebody finished, all of them but those that a lost lead was to
    save; else those that a lead has lived to have saved.
    """
    leads, fallen = _leads(trace), _fallen(case, trace)
    due = {e for e in leads if any(_went_on(trace, rank, e) for rank in leads[e])}
    if _anybody_finished(case, trace):
        excused = {e for e in leads if leads[e] and leads[e] <= fallen} - due
        if _lost_leads(case, trace):
            excused |= {e for e in leads if not leads[e]}
        due = set(range(reference.last // STEPS)) - excused
    return {(epoch + 1) * STEPS for epoch in due}


def _went_on(trace: Trace, rank: int, epoch: int) -> bool:
    """Whether a rank that saw an epoch's end came to what follows it."""
    began = {line["epoch"] for line in trace.lines(rank, "epoch")}
    finished = (trace.outcome(rank) or {}).get("ended") == "finished"
    return epoch + 1 in began or finished


def _fallen(case: Case, trace: Trace) -> frozenset[int]:
    """Return who was lost: the victims, and who found the same disk full."""
    ends = {rank: (trace.outcome(rank) or {}).get("ended") for rank in trace.ranks}
    full = case.fault == "full disk"
    return case.lost | {r for r, ended in ends.items() if full and ended == "OSError"}


def _lost_leads(case: Case, trace: Trace) -> set[int]:
    """Return the lost ranks that led last: one may have led without a word."""
    last = {
        r: [c for c in trace.lines(r, "change") if c["committed"]][-1:]
        for r in trace.ranks
    }
    return {r for r in _fallen(case, trace) if last[r] and last[r][0]["active"][0] == r}


def _due_at_end(case: Case, trace: Trace) -> int | None:
    """Return the step that whoever ended with an error was to save, if any was.

    Every rank that drives a pipeline leaves the state of its last whole step, unless
    it was killed, the others went on without it, or the disk is full.
    """
    if case.fault == "full disk":
        return None
    due = []
    for rank in trace.ranks:
        outcome = trace.outcome(rank)
        if outcome is None or rank in case.gone or outcome["ended"] == "finished":
            continue
        fenced = rank in case.lost and case.fault == "woken"
        # A planted error in the middle of an optimizer step leaves no whole state.
        torn = rank in case.lost and case.point == "in optimizer step"
        if trace.drives(rank) and not fenced and not torn:
            due.append(trace.last_step(rank))
    return max(due, default=None)


# -- what counts ---------------------------------------------------------------


def _anybody_finished(case: Case, trace: Trace) -> bool:
    """Whether a rank finished that was not woken when all was over."""
    others = set(trace.ranks) - case.stopped
    outcomes = [trace.outcome(rank) or {} for rank in others]
    return any(outcome.get("ended") == "finished" for outcome in outcomes)


def _is_alone(case: Case, trace: Trace, rank: int, line: Line) -> bool:
    """Whether a stopped rank did this when it was woken and all others had ended.

    Where it is alone in the active group it may train on until it misses their
    heartbeats, under the plan that it knows.
    """
    late: bool = line["at"] > trace.woken_at
    return late and rank in case.stopped


def _bits_until(case: Case, trace: Trace) -> float:
    """Return until when states must have the bits of the undisturbed run."""
    return trace.struck_at if case.fault == "no room" else trace.replanned_at


def _keeps_bits(case: Case, trace: Trace, line: Line) -> bool:
    early: bool = line["at"] < _bits_until(case, trace)
    return early or case.keeps_bits


def _file_keeps_bits(case: Case, trace: Trace, step: int) -> bool:
    """Whether a state of this step is one of before the plan changed, if it did."""
    lines = [line for rank in trace.ranks for line in trace.steps(rank)]
    made = [line for line in lines if number_of(line) == step]
    if made:
        return all(_keeps_bits(case, trace, line) for line in made)
    # Nobody lived to log it.
    return step == 0 or case.keeps_bits or math.isinf(trace.replanned_at)
