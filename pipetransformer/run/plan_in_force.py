"""What the active ranks run under, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.autocache import Admission
from pipetransformer.planner import Plan
from pipetransformer.run.layout import Layout


@dataclass(frozen=True, kw_only=True)
class PlanInForce:
    """The plan that the run is under; replaced as a whole, by `transformation.phases`.

    Attributes:
        plan: None before the first one.
        layout: Its active ranks; None before the first one.
        cache_slots: Samples that a node's slab held when the plan was made; 0 where its
            frozen layers run for every batch.
        admission: Why they do, or do not; None: it was not compared.
        plan_epoch: Number of the last change of plan that this rank took part in; an
            aborted one's is never used again.
    """

    plan: Plan | None = None
    layout: Layout | None = None
    cache_slots: int = 0
    admission: Admission | None = None
    plan_epoch: int = 0

    @property
    def caches(self) -> bool:
        """False where frozen layers run for every batch because that is cheaper."""
        return self.admission is None or self.admission.caches

    @property
    def uses_disk(self) -> bool:
        """False where nothing is read from disk because that would take longer."""
        return self.admission is None or self.admission.uses_disk
