"""What an injected fault is: where, what, to whom, in which run."""

from __future__ import annotations

import dataclasses
from typing import Literal

Policy = Literal["raise", "continue"]
Expected = Literal["ends", "finishes", "either", "active finish"]
Boundary = Literal["epochs", "batches", "ahead"]

# A change of plan, by its plan epoch: of a run of that many processes, the one that
# a fault in a change of plan meets, and the rank behind each role.
CHANGES = {4: 3, 3: 3, 2: 2}  # replicas join: 2x2 to 1x4, 2x1 to 1x3, 2x1 to 1x2
MEMBERS = {4: 2, 3: 1, 2: 1}
JOINERS = {4: 1, 3: 2, 2: 1}
STANDBY_CHANGES = {4: 2, 3: 2, 2: 1}  # the rank below stands by before and after
STANDBYS = {4: 3, 3: 2, 2: 1}
RETIRING = {4: 4, 3: 4, 2: 3}  # replicas leave: back to K = the world size
PASSES = {4: 1, 3: 2, 2: 1}  # training epoch with more than one replica
STANDBY_PASSES = {4: 1, 3: 0, 2: 0}
PREPARING_PASSES = {4: 2, 3: 3, 2: 2}  # the member trains while a plan is prepared

IN_CHANGE = (
    "before PREPARE",
    "in build",
    "after ack",
    "after COMMIT",
    "in move",
    "in rewire",
    "in retire",
)
IN_PASS = (
    "in backward",
    "in optimizer step",
    "in evaluation",
    "in evaluation within a pass",
    "at pass close",
    "standing by",
)
AT_ENDS = ("in profile", "at finish")
POINTS = (*IN_CHANGE, *IN_PASS, *AT_ENDS)

# Where the lead of three is the only rank that holds the training state, when K is 2.
ALONE = (*IN_CHANGE, "at finish")

KILLS = ("SIGKILL", "SIGSTOP", "SIGTERM", "user error")
SURVIVED = ("slow", "paused", "late", "refusal")
STORE = ("store killed", "store stopped", "store paused")
FAULTS = (*KILLS, *SURVIVED, *STORE)
ROLES = ("lead", "lead and store host", "member", "joiner", "standby", "store host")


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault in one run.

    Attributes:
        point: One of `POINTS`.
        fault: One of `FAULTS`.
        role: Whom it hits; "store host" is a process of its own that only serves the
            store, and "lead and store host" is rank 0 of a run where it serves.
        world_size: Number of ranks.
        between: Where plans change: between epochs, between two batches of a pass, or
            there after being prepared ahead.
    """

    point: str
    fault: str
    role: str
    world_size: int
    between: Boundary = "epochs"

    def __post_init__(self) -> None:
        """Refuse words that no table knows."""
        for value, known in (
            (self.point, POINTS),
            (self.fault, FAULTS),
            (self.role, ROLES),
        ):
            if value not in known:
                raise ValueError(f"case: expected one of {known}, got {value!r}")

    @property
    def name(self) -> str:
        """For people, and for ``--only``."""
        where = {"batches": ", between batches", "ahead": ", prepared ahead"}
        who = f"{self.role} of {self.world_size}"
        return f"{self.point}: {self.fault}, {who}{where.get(self.between, '')}"

    @property
    def own_store(self) -> bool:
        """Whether a process that is no rank serves the store."""
        return self.role != "lead and store host"

    @property
    def rank(self) -> int:
        """The rank that strikes: itself, or the store's host from where it is."""
        ranks = {"member": MEMBERS, "joiner": JOINERS, "standby": STANDBYS}
        return ranks[self.role][self.world_size] if self.role in ranks else 0

    @property
    def victim(self) -> int | None:
        """The rank that is hit; None for the store's host."""
        return None if self.role == "store host" else self.rank

    @property
    def gone(self) -> int | None:
        """The rank that cannot say how it ended, or says it when all is over."""
        return self.victim if self.fault in ("SIGKILL", "SIGSTOP") else None

    @property
    def change(self) -> int | None:
        """The plan epoch in which it strikes, for a point in a change of plan."""
        if self.point not in IN_CHANGE:
            return None
        if self.point == "in retire":
            return RETIRING[self.world_size]
        table = STANDBY_CHANGES if self.role == "standby" else CHANGES
        return table[self.world_size]

    @property
    def epoch(self) -> int | None:
        """The training epoch in which it strikes, for a point in a pass."""
        if self.point not in IN_PASS:
            return None
        table = PREPARING_PASSES if self.between == "ahead" else PASSES
        if self.role == "standby":
            table = STANDBY_PASSES
        return table[self.world_size]

    def expected(self, policy: Policy) -> Expected:
        """Say how the survivors end: with `PeerFailure`, or by finishing.

        Without a store active ranks train on and standbys end; where the plan was
        being changed, or the host was one of the active ranks, all may end.
        """
        if self.fault in (*SURVIVED, "store paused"):
            return "finishes"
        if self.victim is None and self.point == "at finish":
            return "either"  # the store may not be needed any more
        if policy == "raise":
            return "ends"
        if (self.role, self.world_size) == ("lead", 3) and self.point in ALONE:
            return "either"  # perhaps nobody else holds the training state
        if self.role == "lead and store host" or self.point == "in profile":
            return "either"
        if self.victim is None:
            return "either" if self.point in IN_CHANGE else "active finish"
        return "finishes"

    @property
    def keeps_plans(self) -> bool:
        """Whether the run goes through the same plans as an undisturbed one."""
        return self.fault not in ("late", "refusal")
