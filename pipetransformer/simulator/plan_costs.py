"""A plan's step costs, once the plan is known to fit."""

from __future__ import annotations

from pipetransformer import _C
from pipetransformer.planner import Cluster, Plan, Profile, native


def of_plan(plan: Plan, profile: Profile, cluster: Cluster) -> _C.planner.StepCosts:
    """Return what a step of the plan costs.

    Raises:
        ValueError: the plan does not fit the profile or the cluster.
    """
    _check_fits(plan, cluster)
    return native.step_costs(plan, profile, cluster)


def _check_fits(plan: Plan, cluster: Cluster) -> None:
    stages, replicas, microbatches = plan.shape
    per_node = cluster.devices_per_node // stages
    most = cluster.num_nodes * per_node
    if per_node < 1:
        raise ValueError(
            f"plan num_stages: expected at most {cluster.devices_per_node} (the "
            f"cluster's devices per node), got {stages}"
        )
    if replicas > most:
        raise ValueError(
            f"plan num_replicas: expected at most {most} of {stages} devices each in "
            f"this cluster, got {replicas}"
        )
    if replicas * microbatches > plan.global_batch:
        raise ValueError(
            f"plan num_replicas x num_microbatches: expected at most "
            f"{plan.global_batch} (the global batch), got {replicas * microbatches}"
        )
    if plan.boundary > 0 and plan.prefix == "none":
        raise ValueError(
            "plan prefix: expected 'replicated', 'pipelined' or 'filled' for "
            f"{plan.boundary} frozen layers, got 'none'"
        )
