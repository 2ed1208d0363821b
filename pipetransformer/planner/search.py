"""From a profile and a cluster to the plan with the shortest predicted step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipetransformer import _C
from pipetransformer.planner import _reasons, native
from pipetransformer.planner.candidate import CACHE_TIERS, SCHEDULES, Candidate
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import Profile
from pipetransformer.planner.options import SearchOptions, check_integer, merged
from pipetransformer.planner.plan import Plan


class InfeasiblePlan(ValueError):
    """No pipeline fits; the text names each length, its layer and what misses.

    Args:
        message: the whole text.
        refusals: one sentence for each pipeline length.
        hint: what of the options could be given up so that one fits; empty: nothing,
            or it was not looked for.
    """

    def __init__(
        self, message: str, refusals: Sequence[str] = (), hint: str = ""
    ) -> None:
        super().__init__(message)
        self.refusals = tuple(refusals)
        self.hint = hint

    def hinting(self, hint: str) -> InfeasiblePlan:
        """Return the same with a hint."""
        text = f"{self}; {hint}" if hint else str(self)
        return InfeasiblePlan(text, self.refusals, hint)


def search(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions | None = None,
    *,
    boundary: int = 0,
    **choices: Any,
) -> Plan:
    """Find K, R, M, cuts, schedule and cache tier with the shortest step.

    Pure and deterministic: equal arguments give equal plans, on any machine.

    Args:
        profile: measured costs of the layers.
        cluster: devices, memory and links.
        options: what may be chosen from.
        boundary: index of the first active layer = number of frozen layers.
        **choices: fields of `SearchOptions`, in place of `options` or instead of some
            of theirs.

    Returns:
        The plan, with the candidates it beat and the reasons.

    Raises:
        InfeasiblePlan: nothing fits; names K, layer and missing bytes.
        TypeError: a count or a cut is no integer.
        ValueError: an option that no plan can satisfy; the text names it.

    Source: PipeTransformer (ICML 2021), section 3.2, with exact cuts by measured
    time in place of greedy ones by size.
    """
    asked = merged(SearchOptions, options, choices)
    check_integer(boundary, "boundary")
    request, result = _searched(profile, cluster, asked, boundary)
    refusals = _reasons.refusals(result, profile, cluster, asked)
    if not result.candidates:
        raise InfeasiblePlan(
            "plan: expected a pipeline that fits, got none; " + "; ".join(refusals),
            refusals,
        )
    return _make_plan(result, profile, cluster, request, asked, refusals)


def what_would_fit(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    *,
    boundary: int = 0,
) -> str:
    """Say what of the options could be given up so that a plan fits; empty: nothing.

    As few as possible of: the forced number of micro-batches, the schedules, and
    keeping activations. Takes up to seven searches: for an error that a user reads.

    Args:
        profile: as for `search`.
        cluster: as for `search`.
        options: those that nothing fits with.
        boundary: as for `search`.
    """
    wider: list[tuple[str, dict[str, Any]]] = []
    if options.num_microbatches is not None:
        forced = f"without num_microbatches={options.num_microbatches}"
        wider.append((forced, {"num_microbatches": None}))
    if set(options.schedules) != set(SCHEDULES):
        wider.append(("with schedule={}", {"schedules": SCHEDULES}))
    if options.checkpoint != "always":
        wider.append(("with checkpoint='always'", {"checkpoint": "always"}))
    for count in range(1, len(wider) + 1):
        for some in itertools.combinations(wider, count):
            changes = {name: value for _, each in some for name, value in each.items()}
            other = replace(options, **changes)
            found = _searched(profile, cluster, other, boundary)[1].candidates
            if found:
                choice = found[0].choice
                schedule = native.name_of(native.SCHEDULES, choice.schedule)
                words = ", ".join(text for text, _ in some).format(repr(schedule))
                shape = choice.shape
                return (
                    f"{words} K={shape.num_stages} R={shape.num_replicas} "
                    f"M={shape.num_microbatches} would fit"
                )
    return ""


def _searched(
    profile: Profile, cluster: Cluster, asked: SearchOptions, boundary: int
) -> tuple[_C.planner.Request, _C.planner.Result]:
    request = _C.planner.Request()
    request.workload = native.workload(asked, boundary)
    request.num_stages = asked.num_stages
    request.max_replicas = asked.max_replicas
    request.min_replicas = asked.min_replicas
    request.all_replicas = asked.replicas == "all"
    request.num_microbatches = asked.num_microbatches
    request.cuts = None if asked.cuts is None else list(asked.cuts)
    request.min_microbatch_samples = asked.min_microbatch_samples
    request.schedules = [
        native.SCHEDULES[name] for name in sorted(asked.schedules, key=SCHEDULES.index)
    ]
    request.prefix_placements = [
        native.PLACEMENTS[name]
        for name in _placements(asked.prefix_placements, boundary)
    ]
    request.cache_tiers = [
        native.TIERS[name] for name in sorted(asked.cache_tiers, key=CACHE_TIERS.index)
    ]
    return request, _C.planner.search(
        native.profile(profile), native.cluster(cluster), request
    )


def _placements(names: Sequence[str], boundary: int) -> list[str]:
    """Return the placements that are left to `boundary` frozen layers."""
    left = [name for name in names if name != "none" or boundary <= 0]
    if names and not left:
        raise ValueError(
            "prefix_placements: expected 'replicated', 'pipelined' or 'filled' for "
            f"{boundary} frozen layers, got {tuple(names)}"
        )
    return left


def _make_plan(
    result: _C.planner.Result,
    profile: Profile,
    cluster: Cluster,
    request: _C.planner.Request,
    asked: SearchOptions,
    refusals: list[str],
) -> Plan:
    chosen = result.candidates[0]
    choice, shape = chosen.choice, chosen.choice.shape
    replica_rows = -(-asked.global_batch // shape.num_replicas)
    devices = cluster.num_nodes * cluster.devices_per_node
    idle_devices = devices - shape.num_replicas * shape.num_stages
    return Plan(
        boundary=request.workload.boundary,
        num_stages=shape.num_stages,
        num_replicas=shape.num_replicas,
        num_microbatches=shape.num_microbatches,
        samples_per_microbatch=-(-replica_rows // shape.num_microbatches),
        global_batch=asked.global_batch,
        cuts=tuple(choice.cuts),
        schedule=native.name_of(native.SCHEDULES, choice.schedule),
        checkpoint=asked.checkpoint,
        prefix=native.name_of(native.PLACEMENTS, choice.prefix),
        cache=native.name_of(native.TIERS, choice.cache),
        copies=asked.copies,
        num_samples=asked.num_samples,
        accumulation_steps=asked.accumulation_steps,
        predicted_step_ns=chosen.estimate_ns,
        lower_bound_ns=chosen.lower_bound_ns,
        simulated_step_ns=chosen.simulated_ns,
        bubble_fraction=round(chosen.bubble_fraction, 6),
        bytes_per_stage=tuple(chosen.bytes_per_stage),
        idle_devices=idle_devices,
        candidates=tuple(_candidate(each, chosen) for each in result.candidates),
        refusals=tuple(refusals),
        reasons=tuple(_reasons.choice(result, cluster, request, idle_devices)),
        profile_hash=profile.hash,
        cluster_hash=cluster.hash,
    )


def _candidate(
    candidate: _C.planner.Candidate, chosen: _C.planner.Candidate
) -> Candidate:
    choice, shape = candidate.choice, candidate.choice.shape
    return Candidate(
        num_stages=shape.num_stages,
        num_replicas=shape.num_replicas,
        num_microbatches=shape.num_microbatches,
        cuts=tuple(choice.cuts),
        schedule=native.name_of(native.SCHEDULES, choice.schedule),
        prefix=native.name_of(native.PLACEMENTS, choice.prefix),
        cache=native.name_of(native.TIERS, choice.cache),
        predicted_step_ns=candidate.estimate_ns,
        lower_bound_ns=candidate.lower_bound_ns,
        simulated_step_ns=candidate.simulated_ns,
        lost="" if candidate is chosen else _reasons.lost(candidate, chosen),
    )
