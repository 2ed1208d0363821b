"""Judges a case by what it left behind, against an undisturbed run; pure."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

from faults.case import DOUBLE, STORE_LOST, Case, Moment, Policy
from faults.outcomes import (
    STARVE_S,
    Right,
    is_retried,
    limit_s,
    own_ends,
    own_phases,
    right_blames,
    right_outcomes,
)
from faults.small_run import Deadlines
from faults.states import (
    wrong_files,
    wrong_records,
    wrong_samples,
    wrong_states,
    wrong_weights,
)
from faults.trace import Line, Reference, Trace, number_of

SLACK_S = 2.0
MOST_TOLD = 3  # problems of one kind


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one attempt at a case.

    Attributes:
        case: The case.
        problems: What is not as promised; empty when all is.
        outcome: How the survivors ended, in short.
        seconds: From the fault to the last survivor's outcome, or to the end of the
            next step on every survivor that makes it; None where there is none.
        checkpoints: Checkpoint files that were found good.
        unnamed: Survivors whose failure names no rank.
        why: Why this outcome is right, or why the case was left out.
        skipped: This machine does not let it happen.
    """

    case: Case
    problems: tuple[str, ...]
    outcome: str
    seconds: float | None
    checkpoints: int = 0
    unnamed: int = 0
    why: str = ""
    skipped: bool = False


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of a case, to be judged.

    Attributes:
        case: The case.
        policy: Of its engine.
        moment: When it was to strike.
        deadlines: Of its engine.
        slack_s: Seconds beyond what the deadlines promise, for a busy machine.
        trace: What it left behind.
    """

    case: Case
    policy: Policy
    moment: Moment
    deadlines: Deadlines
    slack_s: float
    trace: Trace

    @property
    def survivors(self) -> list[int]:
        """Ranks whose end the policy promises."""
        return [rank for rank in self.trace.ranks if rank not in self.case.gone]

    @property
    def others(self) -> list[int]:
        """Ranks that the fault does not take out of the run by itself."""
        return [rank for rank in self.trace.ranks if rank not in self.lost]

    @property
    def lost(self) -> frozenset[int]:
        """The victims, and who led after them and found the same disk full."""
        outcomes = {rank: self.trace.outcome(rank) for rank in self.trace.ranks}
        fallen = [
            rank
            for rank, outcome in outcomes.items()
            if outcome is not None and outcome["ended"] == "OSError"
        ]
        led = [rank for rank in fallen if _led(self.trace, rank)]
        return self.case.lost | frozenset(led if self.case.fault == "full disk" else ())


def _led(trace: Trace, rank: int) -> bool:
    """Whether a rank led at the last end of an epoch that it saw."""
    ends = trace.lines(rank, "epoch end")
    return bool(ends) and bool(ends[-1]["lead"])


def judge(attempt: Attempt, reference: Reference) -> Verdict:
    """Return what an attempt showed."""
    case, trace = attempt.case, attempt.trace
    right, problems = _ending(attempt)
    problems += [f"hung ranks {sorted(trace.hung)}"] if trace.hung else []
    problems += list(_own_problems(attempt))
    for check in (
        wrong_states,
        wrong_weights,
        wrong_samples,
        wrong_records,
        wrong_files,
    ):
        problems += list(check(case, trace, reference))[:MOST_TOLD]
    problems += list(_blames(attempt))
    problems += list(_retries(attempt)) if is_retried(case) else []
    seconds = _seconds(attempt)
    problems += list(_lateness(attempt, seconds))
    outcomes = [trace.outcome(rank) for rank in attempt.survivors]
    kinds = Counter(o["ended"] for o in outcomes if o is not None)
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return Verdict(
        case=case,
        problems=tuple(problems),
        outcome=text,
        seconds=seconds,
        checkpoints=sum(found is not None for found in trace.checkpoints.values()),
        unnamed=sum(failure["rank"] is None for failure in _failures(attempt).values()),
        why=right.why if right is not None else "",
    )


# -- how they end --------------------------------------------------------------


def _ending(attempt: Attempt) -> tuple[Right | None, list[str]]:
    """Return which of the right outcomes this is, or what is wrong with it."""
    case, trace = attempt.case, attempt.trace
    held = any(trace.holds(rank) for rank in attempt.others)
    rights = right_outcomes(case, attempt.policy, attempt.moment)
    refused = []
    for right in rights:
        wrong = _unlike(attempt, right)
        if right.if_held is not None and right.if_held != held:
            number = "a" if right.if_held else "no"
            wrong.append(f"expected {number} survivor that held the state")
        if not wrong:
            return right, []
        refused.append(f"not {right.ending!r} ({right.why}): {'; '.join(wrong)}")
    return None, refused


def _unlike(attempt: Attempt, right: Right) -> list[str]:
    """Return the ranks that did not end as an outcome says."""
    case, trace, own = attempt.case, attempt.trace, own_ends(attempt.case)
    wrong = []
    for rank in attempt.survivors:
        drives = trace.drives(rank)
        goes_on = right.ending == "finish" or (
            right.ending == "active finish" and drives
        )
        wanted = own.get(rank) or frozenset({"finished" if goes_on else "PeerFailure"})
        if rank in attempt.lost - case.lost:
            continue
        outcome = trace.outcome(rank)
        if (outcome or {}).get("ended") not in wanted:
            wrong.append(f"rank {rank}: expected {' or '.join(wanted)}, got {outcome}")
    return wrong


def _own_problems(attempt: Attempt) -> Iterator[str]:
    """Yield where the case itself did not happen, or a rank broke."""
    case, trace = attempt.case, attempt.trace
    strikes, wanted = trace.strikes(), 2 if case.fault in DOUBLE else 1
    if len(strikes) != wanted:
        yield f"expected {wanted} strikes, got {len(strikes)}"
    for rank, error in enumerate(trace.errors):
        if error and rank not in case.gone:
            yield f"rank {rank}: {error.strip().splitlines()[-1]}"
    if trace.unwoken:
        yield f"stopped ranks {sorted(trace.unwoken)} did not end when woken"
    if not struck_in_time(case, trace):
        yield "the transfer did not go on when it struck"
    if case.fault == "starved":
        yield from _starving(case, trace)
    if case.fault == "woken":
        yield from _after_removal(case, trace)
    if case.fault == "no room" and not trace.lines(case.rank, "no cache"):
        yield "the cache was made all the same"


def struck_in_time(case: Case, trace: Trace) -> bool:
    """Whether the victim was in a transfer when it struck, if it was to be."""
    if case.point != "in transfer":
        return True
    begun = [line["at"] for line in trace.lines(case.rank, "moving")]
    done = [line["at"] for line in trace.lines(case.rank, "moved")]
    at = trace.struck_at
    before = [time for time in begun if time <= at]
    # A stopped rank may complete it when it is woken.
    return bool(before) and not any(before[-1] <= time <= at for time in done)


def _starving(case: Case, trace: Trace) -> Iterator[str]:
    outcome = trace.outcome(case.rank)
    if outcome is not None and outcome["at"] < trace.struck_at + STARVE_S:
        lasted = outcome["at"] - trace.struck_at
        yield f"starved for {lasted:.1f} s of {STARVE_S:g}, then the run was over"


def _after_removal(case: Case, trace: Trace) -> Iterator[str]:
    """A rank that wakes after its removal trains no more, and disturbs nobody.

    One step it may still complete, for itself: the others had waited for it there,
    and what they left behind is still in place.
    """
    woken_at = trace.woken_at
    if math.isinf(woken_at):
        yield "the stopped rank was not removed while the others went on"
        return
    made = {
        rank: [number_of(s) for s in trace.steps(rank) if s["at"] <= trace.struck_at]
        for rank in trace.ranks
    }
    most = max((max(numbers) for numbers in made.values() if numbers), default=0)
    for rank in case.lost:
        last = max(made[rank], default=0)
        # Others may have completed the step that it was in. Or it was new, and in its
        # first one: then theirs tell which that is.
        own = (last + 1,) if last >= most - 1 else (most, most + 1)
        late = [number_of(s) for s in trace.steps(rank) if s["at"] > woken_at]
        if late not in ([], *([number] for number in own)):
            yield f"rank {rank}: made steps {late} after its removal"
    others = [rank for rank in trace.ranks if rank not in case.lost]
    steps = [line["at"] for rank in others for line in trace.steps(rank)]
    if not any(at > woken_at for at in steps):
        yield "expected the others to train on when it woke, got no step"


# -- whom they blame -----------------------------------------------------------


def _failures(attempt: Attempt) -> dict[int, Line]:
    outcomes = {rank: attempt.trace.outcome(rank) for rank in attempt.survivors}
    return {
        rank: outcome
        for rank, outcome in outcomes.items()
        if outcome is not None and outcome["ended"] == "PeerFailure"
    }


def _blames(attempt: Attempt) -> Iterator[str]:
    """Yield failures that blame nobody without need, a wrong rank or phase."""
    case, own = attempt.case, own_ends(attempt.case)
    blames = right_blames(case, attempt.lost, attempt.moment)
    for rank, failure in _failures(attempt).items():
        blamed, phase, text = failure["rank"], failure["phase"], failure["text"]
        if rank in own:
            fine = blamed == rank and phase in own_phases(case)
        else:
            fine = any(blame.covers(blamed, phase, text) for blame in blames)
        if not fine:
            who = "nobody" if blamed is None else f"rank {blamed}"
            yield f"rank {rank}: blames {who}, phase {phase!r}: {text}"
    phases = {failure["phase"] for failure in _failures(attempt).values()}
    if case.fault in STORE_LOST and phases and "store" not in phases:
        yield "nobody says that the store is lost"


def _retries(attempt: Attempt) -> Iterator[str]:
    """Yield if the change of plan was not tried again without the victim."""
    case, trace = attempt.case, attempt.trace
    rank = min(set(trace.ranks) - set(case.victims))
    changes = trace.lines(rank, "change")
    aborted = [
        number
        for number, line in enumerate(changes)
        if not line["committed"] and list(case.victims) == line["culprits"]
    ]
    if not aborted:
        yield f"expected a change aborted for rank {case.rank}, got {changes}"
        return
    after = changes[aborted[0] + 1 :]
    if not after or not after[0]["committed"] or case.rank in after[0]["active"]:
        yield f"expected a retry without rank {case.rank}, got {after[:1]}"


# -- how long it takes ---------------------------------------------------------


def _seconds(attempt: Attempt) -> float | None:
    """Return when the last survivor had failed, or gone on to its next step."""
    trace = attempt.trace
    began = trace.struck_at
    if math.isinf(began):
        return None
    outcomes = [trace.outcome(rank) for rank in attempt.others]
    ends = [o for o in outcomes if o is not None]
    failed = [o["at"] - began for o in ends if o["ended"] != "finished"]
    if len(failed) == len(ends):
        return max(failed, default=None)
    lines = [line for rank in attempt.others for line in trace.steps(rank)]
    later = sorted(number_of(line) for line in lines if line["at"] > began)
    next_one = _next_step(attempt, later)
    made = [line["at"] - began for line in lines if number_of(line) == next_one]
    done = [o["at"] - began for o in ends if o["ended"] == "finished"]
    return max(made) if made else max(done, default=None)


def _next_step(attempt: Attempt, later: list[int]) -> int | None:
    """Return the first step that all of it came after the fault."""
    trace = attempt.trace
    before = [
        number_of(line)
        for rank in trace.ranks
        for line in trace.steps(rank)
        if line["at"] <= trace.struck_at
    ]
    next_one = max(before, default=0) + 1
    if attempt.case.point == "in optimizer step":
        next_one += 1  # the others complete that step without the lost rank
    return next((number for number in later if number >= next_one), None)


def _lateness(attempt: Attempt, seconds: float | None) -> Iterator[str]:
    trace, began = attempt.trace, attempt.trace.struck_at
    case, policy = attempt.case, attempt.policy
    limit = limit_s(case, policy, attempt.deadlines, attempt.slack_s)
    if seconds is not None and seconds > limit:
        yield f"took {seconds:.1f} s, expected at most {limit:.1f} s"
    if case.fault == "full disk":
        return  # the next leads find out at the ends of their epochs
    for rank in attempt.others:
        outcome = trace.outcome(rank)
        if outcome is not None and outcome["ended"] != "finished":
            late = outcome["at"] - began
            if late > limit:
                yield f"rank {rank}: failed after {late:.1f} s, not {limit:.1f} s"
