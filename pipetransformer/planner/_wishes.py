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

    def forbid(self, plan: Plan, num_active: int, cluster: Cluster) -> str:
        """Return why `plan` cannot go on with `num_active` layers; empty: it can."""
        no_room = self._no_room(plan, num_active, cluster)
        name = f"K={plan.num_stages} R={plan.num_replicas} M={plan.num_microbatches}"
        if no_room:
            return f"{name} cannot go on: {no_room}"
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

    def _no_room(self, plan: Plan, num_active: int, cluster: Cluster) -> str:
        """Return what of layers, devices and rows is too few for `plan`, if any."""
        stages, replicas, microbatches = plan.shape
        if stages > num_active:
            return f"active layers left: {num_active}"
        if stages > cluster.devices_per_node:
            return f"devices per node: {cluster.devices_per_node}"
        room = cluster.num_nodes * (cluster.devices_per_node // stages)
        if replicas > room:
            return f"room for replicas: {room}"
        if self.global_batch // replicas // microbatches < self.min_microbatch_samples:
            return (
                f"{replicas} x {microbatches} micro-batches of at least "
                f"{self.min_microbatch_samples} rows, global batch: {self.global_batch}"
            )
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
