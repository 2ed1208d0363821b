"""The options of a search, kept together so that they can be narrowed."""

from __future__ import annotations

import dataclasses

from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import Profile
from pipetransformer.planner.plan import Plan
from pipetransformer.planner.search import search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """Options of `search` but for the boundary; see there."""

    global_batch: int
    num_stages: int | None
    max_replicas: int | None
    num_microbatches: int | None
    cuts: tuple[int, ...] | None
    checkpoint: str
    schedules: tuple[str, ...]
    prefix_placements: tuple[str, ...]
    cache_tiers: tuple[str, ...]
    num_samples: int | None
    copies: str
    min_microbatch_samples: int

    def search(self, profile: Profile, cluster: Cluster, boundary: int) -> Plan:
        """Search with these options."""
        options = {
            entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)
        }
        return search(profile, cluster, boundary=boundary, **options)

    def forbid(self, plan: Plan, num_active: int) -> str:
        """Return why `plan` cannot go on with `num_active` layers; empty: it can."""
        name = f"K={plan.num_stages} R={plan.num_replicas} M={plan.num_microbatches}"
        if plan.num_stages > num_active:
            return f"{name} cannot go on: active layers left: {num_active}"
        for what, wanted, had in (
            ("K", self.num_stages, plan.num_stages),
            ("M", self.num_microbatches, plan.num_microbatches),
        ):
            if wanted is not None and wanted != had:
                return f"{name} cannot go on: {what}={wanted} is asked for"
        if self.max_replicas is not None and self.max_replicas < plan.num_replicas:
            return f"{name} cannot go on: at most {self.max_replicas} replicas"
        if self.cuts is not None and len(self.cuts) != plan.num_stages + 1:
            return f"{name} cannot go on: cuts {list(self.cuts)} are asked for"
        if plan.schedule not in self.schedules:
            return f"{name} cannot go on: {plan.schedule} is not allowed"
        return ""

    def like(self, plan: Plan) -> Wishes:
        """Return these options narrowed to the shape and schedule of `plan`."""
        return dataclasses.replace(
            self,
            num_stages=plan.num_stages,
            max_replicas=plan.num_replicas,
            num_microbatches=plan.num_microbatches,
            schedules=(plan.schedule,),
        )

    def exactly(self, candidate: Candidate) -> Wishes:
        """Return these options narrowed to one candidate."""
        prefix = candidate.prefix
        return dataclasses.replace(
            self,
            num_stages=candidate.num_stages,
            max_replicas=candidate.num_replicas,
            num_microbatches=candidate.num_microbatches,
            cuts=candidate.cuts,
            schedules=(candidate.schedule,),
            prefix_placements=(
                self.prefix_placements if prefix == "none" else (prefix,)
            ),
            cache_tiers=(candidate.cache,),
        )
