"""The systems that Table 1 compares: what each one may do, and how it is run.

A system is a set of switches; the engine does the rest. ``plain``, both ``ddp``s and
a pipeline given by ``--baseline-pipe`` do not run in the engine at all, so that the
rivals owe it nothing; see `plain_loops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pipetransformer as pt


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        name: As printed and in the JSON.
        freezes: Front layers freeze by ``AlphaCap``.
        shrinks: The planner chooses K; otherwise K is the number of slots.
        replicates: Freed slots become replicas.
        caches: Frozen activations are cached.
        loop: What it is, if it is a loop of plain PyTorch without the engine.
        one_process: One process with a thread per slot, not a process per slot.
        schedule: Of `PipeConfig`.
        keeps_profile: It finds the profile of an earlier run (`PlanConfig.profile`).
    """

    name: str
    freezes: bool
    shrinks: bool
    replicates: bool
    caches: bool
    loop: str | None = None
    one_process: bool = False
    schedule: Literal["gpipe", "auto"] = "gpipe"
    keeps_profile: bool = False

    @property
    def engine(self) -> bool:
        """Whether it runs in the engine."""
        return self.loop is None

    @property
    def whole_model(self) -> bool:
        """Whether a slot must hold the whole unfrozen model."""
        return self.loop is not None

    def describe(self) -> str:
        """Return one line that says what is switched on and off."""
        if self.loop is not None:
            return f"{self.name}: plain PyTorch, no engine: {self.loop}"
        parts = [
            ("freezing", self.freezes),
            ("K chosen by the planner", self.shrinks),
            ("replicas", self.replicates),
            ("cache", self.caches),
        ]
        told = [f"{part} {'on' if on else 'off'}" for part, on in parts]
        told += ["the schedule the planner's"] if self.schedule == "auto" else []
        told += ["the profile an earlier run's"] if self.keeps_profile else []
        return f"{self.name}: " + ", ".join(told)

    def plan_config(
        self,
        slots: int,
        microbatches: int | None,
        slot_memory: int | None,
        profiles: Path | None = None,
    ) -> pt.PlanConfig:
        """Return the planner's limits for this system.

        Args:
            slots: CPU slots, one per process.
            microbatches: Forces M of ``static-pipe``; None lets the planner choose.
            slot_memory: Bytes per slot; None for no cap.
            profiles: Where profiles are kept, for a system that keeps its own.
        """
        return pt.PlanConfig(
            slot_memory_bytes=slot_memory,
            num_stages=None if self.shrinks else slots,
            num_microbatches=microbatches,
            max_replicas=None if self.replicates else 1,
            profile=profiles if self.keeps_profile else None,
        )


STATIC_PIPE, AGAIN = "static-pipe", "static-pipe again"
PLAIN, DDP, CACHED_DDP = "plain", "ddp", "ddp+freeze+cache"
REFERENCE, UNCACHED, FULL = "best-static", "freeze+pipe+dp", "full"
ANY_SCHEDULE, KEPT = "full, any schedule", "full, profile kept"
# What the whole system is compared with, each with a work bound.
RIVALS = (STATIC_PIPE, PLAIN, DDP, CACHED_DDP, REFERENCE)

SYSTEMS = {
    system.name: system
    for system in (
        System(STATIC_PIPE, False, False, False, False),
        System(
            PLAIN,
            False,
            False,
            False,
            False,
            loop="one process, as many threads as slots",
            one_process=True,
        ),
        System(DDP, False, False, True, False, loop="torch's DDP"),
        System(
            CACHED_DDP,
            True,
            False,
            True,
            True,
            loop="torch's DDP over the active layers, a cache by sample",
        ),
        System(REFERENCE, False, True, True, False),
        System("freeze-only", True, False, False, False),
        System("freeze+pipe+cache", True, True, False, True),
        System(UNCACHED, True, True, True, False),
        System(FULL, True, True, True, True),
        System(ANY_SCHEDULE, True, True, True, True, schedule="auto"),
        System(KEPT, True, True, True, True, keeps_profile=True),
        # The same system once more, last in a round where the first one is first:
        # their ratio is the size below which no other ratio means anything.
        System(AGAIN, False, False, False, False),
    )
}
