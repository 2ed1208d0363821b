"""What a planner may choose from: alternatives are planned under equal limits."""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.planner import Cluster, Plan, Profile, search


@dataclass(frozen=True, kw_only=True)
class Options:
    """The search options that a plan does not hold itself.

    Args:
        schedules: allowed schedules; None: those of the plan and its candidates.
        prefix_placements: where frozen layers may run.
        cache_tiers: allowed tiers; None: those of the plan and its candidates.
        max_replicas: limits R.
        num_samples: of the data set, for the cache; None: the plan's.
        min_microbatch_samples: least rows of a micro-batch.
    """

    schedules: tuple[str, ...] | None = None
    prefix_placements: tuple[str, ...] = ("replicated", "pipelined")
    cache_tiers: tuple[str, ...] | None = None
    max_replicas: int | None = None
    num_samples: int | None = None
    min_microbatch_samples: int = 1

    def search(
        self,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        *,
        boundary: int | None = None,
        cache_tiers: tuple[str, ...] | None = None,
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        cuts: tuple[int, ...] | None = None,
        schedules: tuple[str, ...] | None = None,
        max_replicas: int | None = None,
    ) -> Plan:
        """Plan again for the batch, checkpoint mode and copy model of ``plan``.

        What is left out is as in ``plan`` (the boundary) or free.

        Raises:
            InfeasiblePlan: nothing fits.
        """
        return search(
            profile,
            cluster,
            global_batch=plan.global_batch,
            boundary=plan.boundary if boundary is None else boundary,
            num_stages=num_stages,
            max_replicas=max_replicas or self.max_replicas,
            num_microbatches=num_microbatches,
            cuts=cuts,
            checkpoint=plan.checkpoint,
            schedules=schedules or self._schedules(plan),
            prefix_placements=self.prefix_placements,
            cache_tiers=cache_tiers or self._cache_tiers(plan),
            num_samples=self.num_samples or plan.num_samples,
            copies=plan.copies,
            min_microbatch_samples=self.min_microbatch_samples,
        )

    def _schedules(self, plan: Plan) -> tuple[str, ...]:
        if self.schedules is not None:
            return self.schedules
        seen = {plan.schedule, *(c.schedule for c in plan.candidates)}
        return tuple(sorted(seen))

    def _cache_tiers(self, plan: Plan) -> tuple[str, ...]:
        if self.cache_tiers is not None:
            return self.cache_tiers
        return tuple(sorted({plan.cache, *(c.cache for c in plan.candidates)}))
