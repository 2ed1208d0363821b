"""Judges what a case left behind, against an undisturbed run; pure."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from _fault_case import KILLS, Case, Policy
from _fault_drive import Trace
from _small_run import SAMPLES, STEPS

# Another number of replicas adds up in another order: a few bits of 53 in each of at
# most 20 steps; see METRICS.md.
TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one case.

    Attributes:
        case: The case.
        problems: What is not as promised; empty when all is.
        outcome: How the survivors ended, in short.
        seconds: From the fault to the last survivor's outcome, or to the end of the
            next step on every survivor that makes it; None where there is none.
        checkpoints: Checkpoint files that were found good.
    """

    case: Case
    problems: tuple[str, ...]
    outcome: str
    seconds: float | None
    checkpoints: int


@dataclasses.dataclass(frozen=True)
class Reference:
    """The undisturbed run of as many ranks.

    Attributes:
        trace: What it left behind.
        hashes: Hash of the state after each optimizer step, from 1.
        ids: Samples of each step, sorted.
    """

    trace: Trace
    hashes: dict[int, str]
    ids: dict[int, list[int]]

    @classmethod
    def of(cls, trace: Trace) -> Reference:
        """Read it off a run's logs.

        Raises:
            ValueError: the run itself was not in order.
        """
        hashes: dict[int, str] = {}
        ids: dict[int, list[int]] = {}
        for rank in range(len(trace.logs)):
            ended = trace.outcome(rank)
            if ended is None or ended["ended"] != "finished":
                raise ValueError(f"rank {rank}: expected the end, got {ended}")
            for line in trace.steps(rank):
                number = number_of(line)
                if hashes.setdefault(number, line["hash"]) != line["hash"]:
                    raise ValueError(f"step {number}: replicas differ")
                ids[number] = sorted([*ids.get(number, []), *line["ids"]])
        return cls(trace, hashes, ids)


def number_of(line: dict[str, int]) -> int:
    """Return the optimizer steps done after a logged step."""
    return line["epoch"] * STEPS + line["batch"] + 1


def judge(case: Case, policy: Policy, trace: Trace, reference: Reference) -> Verdict:
    """Return what a case showed."""
    strikes = trace.strikes()
    problems = [f"hung ranks {sorted(trace.hung)}"] if trace.hung else []
    if len(strikes) != 1:
        problems.append(f"expected 1 strike, got {len(strikes)}")
    survivors = [rank for rank in range(len(trace.logs)) if rank != case.gone]
    outcomes = {rank: trace.outcome(rank) for rank in survivors}
    for rank, error in enumerate(trace.errors):
        if error and rank != case.gone:
            problems.append(f"rank {rank}: {error.strip().splitlines()[-1]}")
    expected = case.expected(policy)
    for rank in survivors:
        problems += _check_outcome(case, rank, outcomes[rank], expected)
    problems += _check_hashes(case, policy, trace, reference)
    if expected == "finishes":
        problems += _check_steps(case, trace, reference)
        problems += _check_weights(case, trace, reference)
    problems += _check_records(trace)
    ended = {o["ended"] for o in outcomes.values() if o is not None}
    if expected == "active finish" and "finished" not in ended:
        problems.append("expected the active ranks to finish, got none")
    if policy == "raise":
        problems += _check_checkpoints(case, trace, reference)
    if trace.woken is False:
        problems.append("the stopped rank did not end when it was woken")
    kinds = Counter(o["ended"] for o in outcomes.values() if o is not None)
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return Verdict(
        case=case,
        problems=tuple(problems),
        outcome=text,
        seconds=_seconds(case, trace, expected),
        checkpoints=sum(found is not None for found in trace.checkpoints.values()),
    )


def _check_outcome(
    case: Case, rank: int, outcome: dict[str, object] | None, expected: str
) -> list[str]:
    if outcome is None:
        return [f"rank {rank}: no outcome"]
    ended, own = outcome["ended"], rank == case.victim
    wanted = {"ends": {"PeerFailure"}, "finishes": {"finished"}}.get(
        expected, {"PeerFailure", "finished"}
    )
    if own and case.fault == "user error":
        wanted = {"Planted"}
    if own and case.fault == "SIGTERM":
        wanted = {"PeerFailure"}
    if ended not in wanted:
        return [f"rank {rank}: expected {' or '.join(wanted)}, got {outcome}"]
    if ended == "PeerFailure":
        guilty = {None, case.victim} if case.victim is not None else {None, 0}
        if not outcome["phase"] or outcome["rank"] not in guilty:
            return [f"rank {rank}: expected the victim and a phase, got {outcome}"]
    return []


def _check_hashes(
    case: Case, policy: Policy, trace: Trace, reference: Reference
) -> list[str]:
    """No two ranks train on with different weights, nor with other ones."""
    seen: dict[int, str] = {}
    for rank in range(len(trace.logs)):
        if policy == "continue" and rank == case.victim:
            continue  # its last step may be one that nobody else has made
        for line in trace.steps(rank):
            number = number_of(line)
            if rank == case.victim and line["at"] > trace.woken_at:
                continue  # alone; see METRICS.md
            if seen.setdefault(number, line["hash"]) != line["hash"]:
                return [f"step {number}: ranks with different weights"]
    if policy == "raise" and case.keeps_plans:
        others = [n for n, found in seen.items() if found != reference.hashes[n]]
        if others:
            return [f"steps {others}: other bits than in the undisturbed run"]
    return []


def _check_steps(case: Case, trace: Trace, reference: Reference) -> list[str]:
    """Each sample once in every epoch: by the steps' own ids.

    But for the steps about the loss of a rank: what it did last is not logged, and
    what is done again has other shares than the batches that the script holds.
    """
    problems = []
    last = _last_before(trace)
    broken = range(last, last + 3) if case.fault in KILLS else ()
    for number, wanted in reference.ids.items():
        if number in broken:
            continue
        parts = {
            rank: line["ids"]
            for rank in range(len(trace.logs))
            for line in trace.steps(rank)
            if number_of(line) == number
        }
        lost = parts.pop(case.victim, []) if case.victim is not None else []
        kept = sorted(i for part in parts.values() for i in part)
        if wanted not in (kept, sorted([*kept, *lost])):
            problems.append(f"step {number}: expected samples {wanted}, got {kept}")
    return problems[:3]


def _check_records(trace: Trace) -> list[str]:
    """Each sample once in every epoch: by the records of the run."""
    problems = []
    for rank in range(len(trace.logs)):
        outcome = trace.outcome(rank)
        records = (
            outcome["history"]["epochs"] if outcome and "history" in outcome else []
        )
        for record in records:
            if (record["samples"], record["unique_samples"]) != (SAMPLES, SAMPLES):
                problems.append(
                    f"epoch {record['epoch']}: expected each of {SAMPLES} samples "
                    f"once, got {record['unique_samples']} in {record['samples']}"
                )
    return problems[:3]


def _check_weights(case: Case, trace: Trace, reference: Reference) -> list[str]:
    """Finished replicas hold equal weights, and those of the undisturbed run."""
    found = {}
    for rank, weights in trace.weights.items():
        steps = trace.steps(rank)
        if steps and number_of(steps[-1]) == max(reference.hashes):
            found[rank] = weights
    if not found:
        return ["nobody finished the last step"]
    first, *others = found.values()
    for weights in others:
        if not all(torch.equal(a, b) for a, b in zip(first, weights, strict=True)):
            return ["replicas finished with different weights"]
    wanted = reference.trace.weights[0]
    far = max(float((a - b).abs().max()) for a, b in zip(first, wanted, strict=True))
    return [] if far <= TOLERANCE else [f"weights: {far:.2g} from the undisturbed run"]


def _check_checkpoints(case: Case, trace: Trace, reference: Reference) -> list[str]:
    problems = []
    alone = {
        number_of(line): line["hash"]
        for line in (trace.steps(case.rank) if case.fault == "SIGSTOP" else [])
        if line["at"] > trace.woken_at
    }
    for name, found in trace.checkpoints.items():
        if found is None:
            problems.append(f"{name} does not load")
        elif case.keeps_plans and found[0] > 0:
            step, bits = found
            if bits not in (reference.hashes.get(step), alone.get(step)):
                problems.append(f"{name}: not the state of step {step}")
    return problems


def _seconds(case: Case, trace: Trace, expected: str) -> float | None:
    strikes = trace.strikes()
    if not strikes:
        return None
    began = strikes[0]["at"]
    survivors = [rank for rank in range(len(trace.logs)) if rank != case.gone]
    if expected == "ends":
        others = [rank for rank in survivors if rank != case.victim]
        outcomes = [trace.outcome(rank) for rank in others]
        return max((o["at"] - began for o in outcomes if o is not None), default=None)
    lines = [line for rank in survivors for line in trace.steps(rank)]
    next_one = _last_before(trace) + 1
    if case.point == "in optimizer step":
        next_one += 1  # the others complete that step without the lost rank
    later = [line["at"] - began for line in lines if number_of(line) == next_one]
    return max(later, default=None)


def _last_before(trace: Trace) -> int:
    """Return the last step that any rank had done when the fault struck."""
    at = min((line["at"] for line in trace.strikes()), default=0.0)
    lines = [line for rank in range(len(trace.logs)) for line in trace.steps(rank)]
    return max((number_of(line) for line in lines if line["at"] <= at), default=0)
