"""How a case may end, whom a failure may blame, and how long that may take; and why."""

from __future__ import annotations

import dataclasses
from typing import Literal

from faults.case import (
    DOUBLE,
    IN_PASS,
    LOSSES,
    RETRIED,
    STORE_LOST,
    SURVIVED,
    Case,
    Moment,
    Policy,
)
from faults.small_run import Deadlines

Ending = Literal["finish", "active finish", "end"]

ALL_ACTIVE = 2  # the plan under which every rank drives a pipeline, counted from 0
COLLECTIVES = frozenset({"broadcast", "all_reduce", "all_gather"})
# Where the active group waits in a collective, or comes to one without a message.
JOINED = ("after COMMIT", "in move", "in transfer", "in rewire")
SLOW_S = 1.0
PAUSE_S = 0.7
STARVE_S = 5.0
LATE = 1.5  # of the protocol's deadline
SLOW_DISK = 1.5  # of the heartbeat timeout: of each fsync
FSYNCS = 2  # of a file and of its folder
STUCK_CLOSE_S = 1.0  # until a rank no longer waits for a stuck group
SILENT_CLOSE_S = 4.0  # nor, twice, for a store that does not answer


@dataclasses.dataclass(frozen=True)
class Right:
    """One way in which the survivors may end, and why it is right.

    Attributes:
        ending: "finish": all of them; "active finish": those that drive a pipeline,
            and the others fail; "end": all fail.
        why: The reason.
        if_held: Right only if a survivor held the state of training (True), or only
            if none did (False); None: either way.
    """

    ending: Ending
    why: str
    if_held: bool | None = None


FINISH = Right("finish", "the fault takes nobody out of the run")
GO_ON = Right("finish", "survivors hold the state, and go on", True)
NO_HOLDER = Right("end", "nobody but the lost ranks held the state", False)
NO_PLAN = Right("end", "rank 0 alone had what the run was to begin with", False)
BEGIN_AGAIN = Right("finish", "rank 0 lives, and makes the first plan again")
POLICY = Right("end", "the policy: one failure ends all")
NO_STORE = Right("end", "the store is lost, and the policy is to end")
STORELESS = Right("active finish", "the plan in force needs no store, waiting does")
IN_CHANGE_WITHOUT = Right("end", "the store was lost in a change of plan")
BOTH_LOST = Right("end", "the store is lost, and with it a rank of the active group")


def right_outcomes(case: Case, policy: Policy, moment: Moment) -> tuple[Right, ...]:
    """Return how the survivors may end; more than one only where chance decides."""
    if case.fault in (*SURVIVED, "store paused"):
        return (FINISH,)
    if policy == "raise":
        return (NO_STORE if case.fault in STORE_LOST else POLICY,)
    if case.role == "lead and store host":
        return (BOTH_LOST,)
    if case.fault in STORE_LOST:
        return (STORELESS if case.outlives_store else IN_CHANGE_WITHOUT,)
    if case.point == "in profile" and 0 not in case.victims:
        return (BEGIN_AGAIN,)
    if case.point == "in profile":
        return (NO_PLAN, GO_ON) if moment.drifts else (NO_PLAN,)
    if case.fault == "full disk":
        # Who leads next writes to the same disk; at last nobody may be left.
        return (GO_ON, NO_HOLDER)
    return _by_holders(case, moment)


def _by_holders(case: Case, moment: Moment) -> tuple[Right, ...]:
    lead_of_three = case.world_size == 3 and case.role == "lead"
    later = moment.drifts or case.fault == "SIGTERM"  # noticed within 0.1 s
    if set(case.victims) >= _holders(case):
        return (NO_HOLDER, GO_ON) if later else (NO_HOLDER,)
    return (GO_ON, NO_HOLDER) if later and lead_of_three else (GO_ON,)


def _holders(case: Case) -> set[int]:
    """Return the ranks that hold the state of training once it strikes.

    K is 2 under "continue", and less only under the plan that the second freezing
    asks for, where every rank is active.
    """
    changed = case.point in ("in rewire", "in retire")
    plan = case.plan_in_force + changed
    if case.world_size == 2 or plan == ALL_ACTIVE:
        return set(range(case.world_size))
    return {3: {0}, 4: {0, 2}}[case.world_size]


@dataclasses.dataclass(frozen=True)
class Blame:
    """Whom and what a `PeerFailure` may name.

    Attributes:
        ranks: The ranks; None among them: nobody.
        phases: The phases.
        text: What it must say besides.
        why: Why nobody can be named, if nobody is.
    """

    ranks: frozenset[int | None]
    phases: frozenset[str]
    text: str = ""
    why: str = ""

    def covers(self, rank: int | None, phase: str, text: str) -> bool:
        """Tell whether a failure is of this kind."""
        return rank in self.ranks and phase in self.phases and self.text in text


def right_blames(case: Case, lost: frozenset[int], moment: Moment) -> tuple[Blame, ...]:
    """Return what a failure of a survivor may say; `lost`: who was, by and by."""
    if case.fault in STORE_LOST:
        why = "the store is lost, and no rank served it"
        found = Blame(frozenset({None}), frozenset({"store"}), why=why)
        return found, _broken("who ended for the lost store could not leave word there")
    named = frozenset[int | None](case.victims)
    silent = Blame(named, frozenset({"heartbeat"}), "no heartbeat")
    if case.role == "lead and store host":
        return (Blame(named, frozenset({"store"})),)
    if case.fault == "SIGTERM":
        return (Blame(named, frozenset({"SIGTERM"})), *_lost_state(lost))
    if case.fault in ("user error", "full disk"):
        return (Blame(named, frozenset({"user code"})), *_lost_state(lost))
    if case.fault in ("SIGKILL", *DOUBLE) and _breaks_a_collective(case, moment):
        broken = _broken("a broken connection does not say who broke it")
        return (silent, *_lost_state(lost), broken)
    return (silent, *_lost_state(lost))


def _broken(why: str) -> Blame:
    return Blame(frozenset({None}), COLLECTIVES, "a peer is gone", why)


def _breaks_a_collective(case: Case, moment: Moment) -> bool:
    """Whether others wait, or soon will, in a collective with the rank that is killed.

    All survivors may then say that a peer is gone: what the first one finds ends all.
    A rank that stands by is in no group, one that still builds the new group in none
    that works, and before the first plan and at the end ranks meet by messages: there
    the heartbeat alone is missed, and it has a rank.
    """
    if case.role == "standby":
        return False
    if moment.drifts or case.point in JOINED:
        return True
    if case.role == "joiner":
        return False
    if case.point in IN_PASS or (case.point, case.role) == ("after ack", "member"):
        return True
    announced = ("before PREPARE", "in build", "after ack")
    return case.between == "ahead" and case.point in announced  # training goes on


def _lost_state(lost: frozenset[int]) -> tuple[Blame, ...]:
    """A survivor that is told of the loss in the rendezvous, where nobody can go on."""
    text, phases = "expected a survivor that holds it", frozenset({"recovery"})
    named = Blame(frozenset[int | None](lost), phases, text)
    if len(lost) < 2:
        return (named,)
    return (named, Blame(frozenset({None}), phases, text, "several were lost at once"))


def own_ends(case: Case) -> dict[int, frozenset[str]]:
    """Return how victims that can say it end themselves, by rank."""
    by_fault = {
        "user error": "Planted",
        "SIGTERM": "PeerFailure",
        "woken": "PeerFailure",
        "full disk": "OSError",
    }
    end = by_fault.get(case.fault)
    return {} if end is None else {rank: frozenset({end}) for rank in case.victims}


def own_phases(case: Case) -> frozenset[str]:
    """Return the phases with which a victim may end itself, all of them its own."""
    if case.fault == "SIGTERM":
        return frozenset({"SIGTERM"})
    if case.fault == "woken":
        # It reads that it was taken for dead, or finds the others' list without it.
        return frozenset({"fenced", "heartbeat"})
    return frozenset()


def limit_s(case: Case, policy: Policy, deadlines: Deadlines, slack_s: float) -> float:
    """Return how long after the strike the last error, or the next step, may come.

    The timeouts promise it: a silent rank is found after the heartbeat timeout and
    one interval. Under "continue" the roll then waits for who neither answers nor
    beats, for as long again. What a rank waits for when it leaves adds to it.
    """
    heartbeat = deadlines.heartbeat
    silence = 1.1 * heartbeat
    waits: dict[str, float] = {
        "slow": SLOW_S,
        "paused": PAUSE_S,
        "store paused": PAUSE_S,
        "starved": STARVE_S,
        "late": LATE * deadlines.protocol,
        "slow disk": FSYNCS * SLOW_DISK * heartbeat,
        "store killed": STUCK_CLOSE_S,
        "store stopped": silence + SILENT_CLOSE_S,
    }
    promised = waits.get(case.fault, 0.0)
    if case.role == "lead and store host":
        promised = silence + SILENT_CLOSE_S
    elif case.fault in (*LOSSES, *DOUBLE, "woken"):
        roll = heartbeat if policy == "continue" else STUCK_CLOSE_S
        promised = (silence + roll) * len(case.victims)
    return promised + slack_s


def is_retried(case: Case) -> bool:
    """Whether the change of plan must be tried again without the victim."""
    return case.fault in RETRIED
