"""The systems that Table 1 compares: what each one may do, and how it is run.

A system is a set of switches; the engine does the rest. ``ddp`` and a pipeline given
by ``--baseline-pipe`` do not run in the engine at all, so that the rivals owe it
nothing; see `_plain_loops`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        engine: Runs in the engine; otherwise a loop of plain PyTorch.
    """

    name: str
    freezes: bool
    shrinks: bool
    replicates: bool
    caches: bool
    engine: bool = True

    def describe(self) -> str:
        """Return one line that says what is switched on and off."""
        if not self.engine:
            return f"{self.name}: plain PyTorch, no engine"
        parts = [
            ("freezing", self.freezes),
            ("K chosen by the planner", self.shrinks),
            ("replicas", self.replicates),
            ("cache", self.caches),
        ]
        return f"{self.name}: " + ", ".join(
            f"{part} {'on' if on else 'off'}" for part, on in parts
        )

    def plan_config(
        self, slots: int, microbatches: int | None, slot_memory: int | None
    ) -> pt.PlanConfig:
        """Return the planner's limits for this system.

        Args:
            slots: CPU slots, one per process.
            microbatches: Forces M of ``static-pipe``; None lets the planner choose.
            slot_memory: Bytes per slot; None for no cap.
        """
        return pt.PlanConfig(
            slot_memory_bytes=slot_memory,
            num_stages=None if self.shrinks else slots,
            num_microbatches=microbatches,
            max_replicas=None if self.replicates else 1,
        )


STATIC_PIPE, DDP, REFERENCE, FULL = "static-pipe", "ddp", "best-static", "full"
RIVALS = (STATIC_PIPE, DDP, REFERENCE)

SYSTEMS = {
    system.name: system
    for system in (
        System(STATIC_PIPE, False, False, False, False),
        System(DDP, False, False, True, False, engine=False),
        System(REFERENCE, False, True, True, False),
        System("freeze-only", True, False, False, False),
        System("freeze+pipe+cache", True, True, False, True),
        System("freeze+pipe+dp", True, True, True, False),
        System(FULL, True, True, True, True),
    )
}
