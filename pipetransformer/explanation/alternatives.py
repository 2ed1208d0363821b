"""Other ways to run the same model on the same cluster, judged by the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from pipetransformer.explanation.report import Counterfactual
from pipetransformer.planner import (
    Cluster,
    InfeasiblePlan,
    Plan,
    Profile,
    SearchOptions,
    paper,
    search,
)
from pipetransformer.simulator import Simulation, simulate

_BYTES_PER_PARAMETER = 4  # the paper's rule counts parameters, a profile bytes


def find_alternatives(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    run: Simulation,
) -> tuple[Counterfactual, ...]:
    """Return the alternatives in a fixed order, those that do not fit included.

    The first three freeze nothing, as a run without freezing would be.

    Args:
        plan: the chosen plan.
        profile: its layers.
        cluster: its machines.
        options: what the planner may choose from, nothing of it forced.
        run: the plan's simulated step.
    """
    static = replace(options, cache_tiers=("none",))

    def planned(
        name: str, title: str, make: Callable[[], Plan], remark: str = ""
    ) -> Counterfactual:
        try:
            other = make()
        except InfeasiblePlan as refusal:
            reason = "; ".join(refusal.refusals) or str(refusal)
            return Counterfactual(name=name, title=title, reason=reason)
        except ValueError as refusal:  # such as the paper's cuts of a shared layer
            return Counterfactual(name=name, title=title, reason=str(refusal))
        return Counterfactual(
            name=name,
            title=title,
            plan=f"{other.describe()}, {other.schedule}",
            step_ns=other.simulated_step_ns,
            peak_bytes=max(other.bytes_per_stage),
            reason=remark,
        )

    return (
        planned(
            "paper_static",
            "paper, static",
            lambda: _paper_plan(profile, cluster, static),
            "nothing frozen; greedy cuts by parameters, K of all devices of a node",
        ),
        planned(
            "best_static",
            "best static plan",
            lambda: search(profile, cluster, static),
            "nothing frozen",
        ),
        planned(
            "plain_ddp",
            "plain DDP",
            lambda: search(
                profile,
                cluster,
                static,
                num_stages=1,
                replicas="all",
                num_microbatches=1,
                schedules=("gpipe",),
            ),
            "nothing frozen; the model whole on each device that a batch has rows for",
        ),
        _same(plan, run, "no_cache", "no cache", "the plan uses none")
        if plan.cache == "none"
        else planned(
            "no_cache",
            "no cache",
            lambda: search(profile, cluster, static, boundary=plan.boundary),
            "frozen layers computed anew in every step",
        ),
        _serial_prefix(plan, profile, cluster, run),
    )


def paper_cuts(profile: Profile, num_stages: int) -> tuple[int, ...]:
    """Return the paper's greedy cuts by parameters of the unfrozen model.

    Stages that the rule leaves empty are dropped: their devices would stand idle.

    Args:
        profile: its layers; 4 bytes count as one parameter.
        num_stages: stages the rule is asked for.

    Source: PipeTransformer (ICML 2021), section 3.2.
    """
    sizes = [layer.parameter_bytes // _BYTES_PER_PARAMETER for layer in profile.layers]
    counts = paper.greedy_partition(sizes, num_stages)
    return (0, *accumulate(count for count in counts if count > 0))


def _paper_plan(profile: Profile, cluster: Cluster, options: SearchOptions) -> Plan:
    num_stages = cluster.devices_per_node  # the paper starts with a node per pipeline
    limit = options.max_replicas or cluster.num_nodes
    return search(
        profile,
        cluster,
        options,
        cuts=paper_cuts(profile, num_stages),
        num_microbatches=paper.num_microbatches(num_stages),
        schedules=("gpipe",),
        max_replicas=min(limit, cluster.num_nodes),
        replicas="all",
    )


def _serial_prefix(
    plan: Plan, profile: Profile, cluster: Cluster, run: Simulation
) -> Counterfactual:
    name, title = "serial_prefix", "serial prefix"
    if plan.prefix == "none":
        return _same(plan, run, name, title, "the plan has no frozen layers")
    serial = simulate(plan, profile, cluster, prefix="serial")
    return Counterfactual(
        name=name,
        title=title,
        plan=f"{plan.describe()}, {plan.schedule}",
        step_ns=serial.step_ns,
        peak_bytes=max(serial.peak_bytes_per_stage),
        reason="frozen layers on the first device alone, as in the paper",
    )


def _same(
    plan: Plan, run: Simulation, name: str, title: str, reason: str
) -> Counterfactual:
    return Counterfactual(
        name=name,
        title=title,
        plan=f"{plan.describe()}, {plan.schedule}",
        step_ns=run.step_ns,
        peak_bytes=max(run.peak_bytes_per_stage),
        reason=reason,
    )
