"""Where a plan puts what, for the price of a change."""

from __future__ import annotations

import dataclasses

from pipetransformer import _C
from pipetransformer.core.wire import LARGEST_INT
from pipetransformer.planner import native
from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import Profile
from pipetransformer.planner.options import SearchOptions
from pipetransformer.planner.plan import Plan


class Places:
    """Profile and cluster as the extension takes them, and what plans put there.

    Args:
        profile: measured costs of the layers.
        cluster: devices, memory and links.
        options: options of the search.
        boundary: index of the first active layer from now on.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, options: SearchOptions, boundary: int
    ) -> None:
        self.profile = native.profile(profile)
        self.cluster = native.cluster(cluster)
        self.boundary = boundary
        self._profile = profile
        self._cluster = cluster
        self._workload = native.workload(options, boundary)

    def in_force(self, plan: Plan) -> _C.planner.Placement:
        """Return stages of the plan in force and what they hold between two steps.

        The cluster and the batch may be too small for it by now: it is placed on a
        cluster that has the devices, for the batch that it was made for.
        """
        nodes = self._cluster.num_nodes
        devices = plan.num_stages * -(-plan.num_replicas // nodes)
        devices = max(devices, self._cluster.devices_per_node)
        wide = dataclasses.replace(self._cluster, devices_per_node=devices)
        costs = native.step_costs(plan, self._profile, wide)
        return _placement(plan, costs)

    def placement(self, plan: Plan | Candidate) -> _C.planner.Placement:
        """Return stages at the new boundary and what they hold between two steps."""
        costs = _C.planner.step_costs(
            self.profile, self.cluster, self._workload, native.choice(plan)
        )
        return _placement(plan, costs)

    def lost_cache_bytes(self, plan: Plan | Candidate) -> int:
        """Return what a new shape must read again: a cache on devices moves with them.

        Slabs of a node stay where they are, whatever K and R.
        """
        samples = self._workload.num_samples
        if plan.cache != "device" or self.boundary == 0 or samples is None:
            return 0
        layer = self._profile.layers[self.boundary - 1]
        return min(samples * layer.boundary_bytes_per_sample, LARGEST_INT)


def _placement(
    plan: Plan | Candidate, costs: _C.planner.StepCosts
) -> _C.planner.Placement:
    state_bytes = [stage.state_bytes for stage in costs.stages]
    shape = _C.planner.Shape(*plan.shape)
    return _C.planner.Placement(shape, list(plan.cuts), state_bytes)
