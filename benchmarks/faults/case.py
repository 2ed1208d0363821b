"""What an injected fault is: where, what, to whom, in which run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from faults.small_run import FREEZES

Policy = Literal["raise", "continue"]
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
    "in transfer",
    "in rewire",
    "in retire",
)
IN_PASS = (
    "in backward",
    "in optimizer step",
    "in evaluation",
    "in evaluation within a pass",
    "at pass close",
    "at checkpoint",
    "standing by",
)
AT_ENDS = ("in profile", "at finish")
MAKING_CACHE = "making the cache"
POINTS = (*IN_CHANGE, *IN_PASS, MAKING_CACHE, *AT_ENDS)

LOSSES = ("SIGKILL", "SIGSTOP")  # the rank cannot say any more how it ended
DOUBLE = ("kill and kill", "kill and stop")
KILLS = (*LOSSES, *DOUBLE, "SIGTERM", "user error", "woken", "full disk")
RETRIED = ("late", "refusal")  # the change of plan is tried again without the rank
HARMLESS = (
    "slow",
    "paused",
    "starved",
    "clock ahead",
    "clock behind",
    "slow disk",
    "no room",
)
SURVIVED = (*HARMLESS, *RETRIED)
STORE_LOST = ("store killed", "store stopped")
STORE = (*STORE_LOST, "store paused")
FAULTS = (*KILLS, *SURVIVED, *STORE)
ROLES = ("lead", "lead and store host", "member", "joiner", "standby", "store host")

# Faults that come from outside, and so may strike while the process goes on.
DRIFTING = (*LOSSES, *DOUBLE, "SIGTERM", "paused", "starved", "woken")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What distinguishes undisturbed runs.

    Attributes:
        between: Where plans change: between epochs, between two batches of a pass, or
            there after being prepared ahead.
        world_size: Number of ranks.
        large: The model's state is above 100 MB.
        stays_at: The change of plan after which nothing is frozen or unfrozen any
            more, counted from 0; None: the whole schedule.
    """

    between: Boundary
    world_size: int
    large: bool = False
    stays_at: int | None = None

    @property
    def freezes(self) -> tuple[int, ...]:
        """Frozen units by epoch."""
        counts = FREEZES[self.world_size]
        if self.large:
            counts = counts[:3]  # up to the change that moves the state
        if self.stays_at is None:
            return counts
        rest = len(counts) - self.stays_at
        return (*counts[: self.stays_at], *rest * (counts[self.stays_at],))


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a fault strikes after its point.

    Attributes:
        delay_s: Seconds after the point.
        drifts: The process goes on meanwhile; otherwise it stays at the point.
    """

    delay_s: float = 0.0
    drifts: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault in one run.

    Attributes:
        point: One of `POINTS`.
        fault: One of `FAULTS`.
        role: Whom it hits; "store host" is a process of its own that only serves the
            store, and "lead and store host" is rank 0 of a run where it serves.
        world_size: Number of ranks.
        between: As `Kind.between`.
        second: The role of the rank that is struck next, by the faults of `DOUBLE`.
    """

    point: str
    fault: str
    role: str
    world_size: int
    between: Boundary = "epochs"
    second: str | None = None

    def __post_init__(self) -> None:
        """Refuse words that no table knows, and a second rank without its fault."""
        for value, known in (
            (self.point, POINTS),
            (self.fault, FAULTS),
            (self.role, ROLES),
        ):
            if value not in known:
                raise ValueError(f"case: expected one of {known}, got {value!r}")
        if (self.fault in DOUBLE) != (self.second is not None):
            raise ValueError(f"case: expected a second rank for {DOUBLE} alone")

    @property
    def name(self) -> str:
        """For people, and for ``--only``."""
        where = {"batches": ", between batches", "ahead": ", prepared ahead"}
        who = self.role if self.second is None else f"{self.role} and {self.second}"
        return (
            f"{self.point}: {self.fault}, {who} of {self.world_size}"
            f"{where.get(self.between, '')}"
        )

    @property
    def own_store(self) -> bool:
        """Whether a process that is no rank serves the store."""
        return self.role != "lead and store host"

    @property
    def rank(self) -> int:
        """The rank that strikes: itself, or the store's host from where it is."""
        return self._rank_of(self.role)

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks that are hit; none where it is the store's host."""
        if self.role == "store host":
            return ()
        second = () if self.second is None else (self._rank_of(self.second),)
        return (self.rank, *second)

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that the others have to do without."""
        return frozenset(self.victims if self.fault in KILLS else ())

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that cannot say how they ended, or say it when all is over."""
        silent = self.fault in (*LOSSES, *DOUBLE)
        return frozenset(self.victims if silent else ())

    @property
    def stopped(self) -> frozenset[int]:
        """The ranks that are stopped until all others have ended."""
        hit = {"SIGSTOP": self.victims, "kill and stop": self.victims[1:]}
        return frozenset(hit.get(self.fault, ()))

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

    @property
    def kind(self) -> Kind:
        """The undisturbed run of the same processes."""
        return Kind(self.between, self.world_size, self.point == "in transfer")

    @property
    def outlives_store(self) -> bool:
        """Whether training can go on without a store: nothing needs one right then."""
        training = ("before PREPARE", "in build", "after ack")
        ahead = self.between == "ahead" and self.point in training
        within = self.point not in IN_CHANGE or ahead
        return self.fault in STORE_LOST and within

    @property
    def plan_in_force(self) -> int:
        """The plan that training goes on under when it strikes, counted from 0."""
        if self.change is not None:
            return self.change - 2
        if self.epoch is not None:
            # Prepared ahead: while the plan of this epoch is not there yet.
            return self.epoch - (self.between == "ahead")
        return len(FREEZES[self.world_size]) - 1

    @property
    def keeps_bits(self) -> bool:
        """Whether those who go on come to the very bits of an undisturbed run.

        Not where a plan changes without a rank: a starved one may be late for it, too.
        And not without a cache: what is computed again is computed among other rows.
        """
        return not self.lost and self.fault not in (*RETRIED, "starved", "no room")

    def _rank_of(self, role: str) -> int:
        ranks = {"member": MEMBERS, "joiner": JOINERS, "standby": STANDBYS}
        return ranks[role][self.world_size] if role in ranks else 0
