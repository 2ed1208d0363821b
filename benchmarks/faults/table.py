"""The cases: which faults strike whom at which points, in runs of which size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from faults.case import AT_ENDS, DOUBLE, IN_PASS, MAKING_CACHE, Case, Policy
from faults.case import IN_CHANGE as ANYWHERE_IN_CHANGE

WORLDS = (2, 3, 4)
# A transfer needs a model of its own, a file is the lead's.
IN_CHANGE = tuple(p for p in ANYWHERE_IN_CHANGE if p != "in transfer")
TRAINING = tuple(p for p in IN_PASS if p not in ("at checkpoint", "standing by"))
# Where a rank of each role passes by.
LEAD = (*IN_CHANGE, *TRAINING, *AT_ENDS)
MEMBER = (*IN_CHANGE, *TRAINING, "at finish")
JOINER = ("in build", "after COMMIT", "in move", "in rewire")
STANDBY = (
    "before PREPARE",
    "after ack",
    "after COMMIT",
    "standing by",
    "in evaluation",
    *AT_ENDS,
)
STORE_POINTS = (
    "before PREPARE",
    "in build",
    "after ack",
    "in move",
    "in backward",
    "in evaluation",
    "at finish",
)
# A user's error needs a call of the user's, or one on the main thread.
ERRORS = (
    "before PREPARE",
    "after ack",
    "after COMMIT",
    "in rewire",
    "in backward",
    "in optimizer step",
    "in evaluation",
    "at pass close",
)
SLOW = (
    "before PREPARE",
    "in build",
    "after COMMIT",
    "in move",
    "in rewire",
    "in backward",
    "in optimizer step",
    "at pass close",
    "at finish",
)
ROLE_POINTS = {
    "lead": LEAD,
    "member": MEMBER,
    "joiner": JOINER,
    "standby": STANDBY,
}


def cases(policy: Policy) -> list[Case]:
    """Return all cases of a policy, in the order of the table."""
    found = [
        *_lost("SIGKILL", worlds=2),
        *_lost("SIGSTOP", worlds=1),
        *_each("SIGTERM", ("lead", "member"), IN_CHANGE[1:6]),
        *_each("SIGTERM", ("lead", "member"), ("in backward", "in evaluation")),
        *_each("SIGTERM", ("standby",), ("standing by", "in evaluation")),
        *_each("user error", ("lead", "member"), ERRORS),
        *_each("slow", ("member",), SLOW),
        *_each("paused", ("lead", "member"), ("in build", "in move", "in backward")),
        *_each("paused", ("standby",), ("standing by",)),
        *_each("late", ("member", "standby"), ("before PREPARE",)),
        *_each("late", ("member",), ("in build",)),
        *_each("refusal", ("lead", "member", "joiner"), ("in build",)),
        *_each("SIGKILL", ("lead and store host",), (*STORE_POINTS, "in profile")),
        *_each("SIGSTOP", ("lead and store host",), STORE_POINTS[:6:2]),
        *_each("store killed", ("store host",), STORE_POINTS),
        *_each("store stopped", ("store host",), STORE_POINTS[:-1]),
        *_each("store paused", ("store host",), STORE_POINTS[:-1:2]),
        *_between_batches(),
        *_prepared_ahead(),
        *_in_transfer(),
        *_two_at_once(),
        *_woken(),
        *_starved(),
        *_surroundings(),
    ]
    possible = _possible if policy == "raise" else _possible_to_survive
    return [case for case in found if possible(case)]


def _lost(fault: str, *, worlds: int) -> Iterator[Case]:
    for role, points in ROLE_POINTS.items():
        for number, point in enumerate(points):
            for turn in range(worlds):
                world = WORLDS[(number + turn + worlds) % len(WORLDS)]
                yield Case(point, fault, role, world)


def _each(fault: str, roles: Sequence[str], points: Sequence[str]) -> Iterator[Case]:
    for role in roles:
        for number, point in enumerate(points):
            yield Case(point, fault, role, WORLDS[-1 - number % len(WORLDS)])


def _between_batches() -> Iterator[Case]:
    """Changes of plan in the middle of a pass, where a standby waits in `batches`."""
    for fault, role, points in (
        ("SIGKILL", "lead", IN_CHANGE),
        ("SIGKILL", "member", IN_CHANGE),
        ("SIGKILL", "standby", STANDBY[:3]),
        ("SIGSTOP", "member", IN_CHANGE[::2]),
        ("SIGSTOP", "lead", IN_CHANGE[1::2]),
        ("SIGTERM", "member", IN_CHANGE[2:5]),
        ("slow", "member", IN_CHANGE[1:6:2]),
        ("late", "member", IN_CHANGE[:1]),
        ("refusal", "member", IN_CHANGE[1:2]),
    ):
        for case in _each(fault, (role,), points):
            yield dataclasses.replace(case, between="batches")


def _prepared_ahead() -> Iterator[Case]:
    """Plans that are prepared while training goes on."""
    training = ("in backward", "in optimizer step")
    waiting = IN_CHANGE[3:6]  # active ranks are still training
    for fault, role, points in (
        ("SIGKILL", "lead", (*IN_CHANGE, *training)),
        ("SIGKILL", "member", (*IN_CHANGE, *training)),
        ("SIGKILL", "joiner", JOINER),
        ("SIGKILL", "standby", STANDBY[:3]),
        ("SIGSTOP", "lead", (*IN_CHANGE[1::2], "in backward")),
        ("SIGSTOP", "member", (*IN_CHANGE[::2], "in backward")),
        ("SIGSTOP", "joiner", waiting),
        ("SIGTERM", "member", (*waiting, "in backward")),
        ("user error", "member", ("before PREPARE", "after ack", "in backward")),
        ("slow", "member", IN_CHANGE[:6]),
        ("slow", "joiner", JOINER),
        ("late", "member", IN_CHANGE[:2]),
        ("refusal", "lead", IN_CHANGE[1:2]),
        ("refusal", "joiner", IN_CHANGE[1:2]),
        ("store killed", "store host", (*STORE_POINTS[:4], "in backward")),
        ("store stopped", "store host", ("in build", "in backward")),
        ("store paused", "store host", ("in build", "after ack")),
    ):
        for case in _each(fault, (role,), points):
            yield dataclasses.replace(case, between="ahead")


def _in_transfer() -> Iterator[Case]:
    """Losses while 107 MB of weights and moments are on their way."""
    for fault, role, world in (
        ("SIGKILL", "lead", 3),
        ("SIGKILL", "joiner", 3),
        ("SIGKILL", "member", 4),
        ("SIGKILL", "joiner", 4),
        ("SIGSTOP", "lead", 4),
        ("SIGSTOP", "joiner", 3),
    ):
        yield Case("in transfer", fault, role, world)


def _two_at_once() -> Iterator[Case]:
    """Two losses within one heartbeat, among them all that hold the state."""
    for point, role, second in (
        ("in backward", "member", "standby"),
        ("in backward", "lead", "member"),
        ("in evaluation", "lead", "standby"),
        ("in build", "member", "joiner"),
        ("in move", "joiner", "standby"),
    ):
        for fault in DOUBLE:
            yield Case(point, fault, role, 4, second=second)


def _woken() -> Iterator[Case]:
    """Ranks that are stopped, removed, and wake while the others train on."""
    for point, role, world in (
        ("in backward", "lead", 4),
        ("in backward", "member", 3),
        ("in optimizer step", "member", 4),
        ("in evaluation", "lead", 3),
        ("at checkpoint", "lead", 4),
        ("before PREPARE", "member", 4),
        ("in build", "joiner", 4),
        ("in move", "member", 4),
        ("standing by", "standby", 4),
    ):
        yield Case(point, "woken", role, world)
    yield Case("in backward", "woken", "member", 4, between="ahead")


def _starved() -> Iterator[Case]:
    """Ranks that get 5 % of a core for 5 s, and must not be taken for dead."""
    for point, role, world in (
        ("in backward", "lead", 4),
        ("in backward", "member", 3),
        ("before PREPARE", "member", 2),
        ("standing by", "standby", 4),
    ):
        yield Case(point, "starved", role, world)


def _surroundings() -> Iterator[Case]:
    """Disks, memory and clocks that are not as they should be."""
    for world in (4, 3):
        yield Case("at checkpoint", "SIGKILL", "lead", world)
        yield Case("at checkpoint", "full disk", "lead", world)
        yield Case("at checkpoint", "slow disk", "lead", world)
        yield Case(MAKING_CACHE, "no room", "lead", world)
        for fault in ("clock ahead", "clock behind"):
            yield Case("in backward", fault, "lead", world)
    for fault in ("clock ahead", "clock behind"):
        yield Case("before PREPARE", fault, "member", 4)


def _possible(case: Case) -> bool:
    """Leave out a joiner that is the member, and whom nobody can remove."""
    return (
        not (case.role == "joiner" and case.world_size == 2) and case.fault != "woken"
    )


def _possible_to_survive(case: Case) -> bool:
    """Leave out what two ranks do not pass by, who must be able to go on alone."""
    if case.between != "epochs" and case.world_size == 2:
        return False
    absent = ("in build", "in move", "in retire", "standing by", "in profile")
    few = case.world_size == 2
    return not few or (case.point not in absent and case.role in ("lead", "member"))
