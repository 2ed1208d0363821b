"""What every plan of a run is made from."""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.autocache import CacheRates
from pipetransformer.planner import Cluster, Profile
from pipetransformer.run.arguments import Workload


@dataclass
class PlanInputs:
    """Known from the first plan on, and equal on every rank.

    Attributes:
        workload: The training set and the batch; None before `batches`.
        profile: What the layers cost; None until it is measured, or received.
        cluster: The devices; comes with the profile.
        rates: Of the cache, measured then; without those of host memory reads count as
            free.
        whole_batches: Why the layers cannot take micro-batches, so that M is 1; comes
            with the profile, empty if they can.
    """

    workload: Workload | None = None
    profile: Profile | None = None
    cluster: Cluster | None = None
    rates: CacheRates = CacheRates()
    whole_batches: str = ""
