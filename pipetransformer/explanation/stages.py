"""The stages of a plan: costs, memory, micro-batches in flight, bubble."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise

from pipetransformer.explanation.report import StageReport
from pipetransformer.planner import Cluster, Plan, Profile, step_costs
from pipetransformer.simulator import Event, Simulation

_OPERATIONS = frozenset("FRBIW")


def bare_stages(plan: Plan) -> tuple[StageReport, ...]:
    """Return what the plan itself holds about its stages."""
    sizes = plan.bytes_per_stage or (None,) * plan.num_stages
    return tuple(
        StageReport(
            stage=stage,
            first_layer=begin,
            last_layer=end - 1,
            device_bytes=sizes[stage],
        )
        for stage, (begin, end) in enumerate(pairwise(plan.cuts))
    )


def stage_reports(
    plan: Plan, profile: Profile, cluster: Cluster, run: Simulation
) -> tuple[StageReport, ...]:
    """Return the stages with their times, as counted and as simulated.

    Args:
        plan: the plan.
        profile: its layers.
        cluster: its machines.
        run: the simulated step.
    """
    costs = step_costs(plan, profile, cluster).stages
    operations = [e for e in run.timeline if e.kind in _OPERATIONS]
    span = _span_ns(operations)
    in_flight = most_in_flight(operations, plan.num_stages)
    return tuple(
        replace(
            bare,
            device_bytes=peak if bare.device_bytes is None else bare.device_bytes,
            forward_ns=cost.forward_ns,
            input_grad_ns=cost.input_grad_ns,
            weight_grad_ns=cost.weight_grad_ns,
            recompute_ns=cost.recompute_ns,
            in_flight=live,
            bubble_share=1.0 - busy / span if span else 0.0,
        )
        for bare, cost, live, busy, peak in zip(
            bare_stages(plan),
            costs,
            in_flight,
            run.stage_busy_ns,
            run.peak_bytes_per_stage,
            strict=True,
        )
    )


def most_in_flight(operations: Iterable[Event], num_stages: int) -> list[int]:
    """Return by stage the most micro-batches that have begun and are not done.

    A micro-batch is done when its last operation on the stage ends: it counts from
    F to B, or to W where backward is split.

    Args:
        operations: F, R, B, I and W of one replica.
        num_stages: K.
    """
    lives: dict[tuple[int, int | None], tuple[int, int]] = {}
    for event in operations:
        key = event.stage, event.microbatch
        begin, end = lives.get(key, (event.begin_ns, event.end_ns))
        lives[key] = min(begin, event.begin_ns), max(end, event.end_ns)
    most = []
    for stage in range(num_stages):
        spans = [span for (at, _), span in lives.items() if at == stage]
        changes = [(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]
        # An end at the time of a beginning comes first: -1 sorts before 1.
        most.append(max(accumulate(change for _, change in sorted(changes))))
    return most


def _span_ns(operations: list[Event]) -> int:
    if not operations:
        return 0
    first = min(event.begin_ns for event in operations)
    return max(event.end_ns for event in operations) - first
