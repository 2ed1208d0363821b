"""The plan for a new boundary, and whether it is worth changing more than that."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from pipetransformer.core import wire
from pipetransformer.planner import _binding, _reasons
from pipetransformer.planner._offers import RESHAPES, Market, Priced, Terms, short
from pipetransformer.planner._places import Places
from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import Profile
from pipetransformer.planner.options import SearchOptions
from pipetransformer.planner.pauses import PauseModel
from pipetransformer.planner.plan import Plan
from pipetransformer.planner.search import InfeasiblePlan, asked_for, search
from pipetransformer.planner.transition import Transition

RESHAPE_MODES = tuple(RESHAPES)


def replan(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions | None = None,
    *,
    current: Plan,
    boundary: int,
    remaining_steps: int,
    pace: float = 1.0,
    pauses: PauseModel | None = None,
    elapsed_since_last_ns: int | None = None,
    hysteresis: float = 0.25,
    reshape: str = "priced",
    **choices: Any,
) -> Plan:
    """Plan again at a boundary; change K, R, M or cuts only where that pays.

    Freezing is the policy's decision: a new boundary is always carried out, with the
    K, R and M in force and the cuts behind it, cut anew where a stage would be empty.
    Everything else is on offer: the candidates of `search`, and those with the K and
    R in force. An offer is taken if it saves more than (1 + ``hysteresis``) x what its
    pause adds, if its step is at most 98 % of the one it replaces, if a new K or R is
    more than 10 pauses after the last one, and if no device would have to hold both
    plans. Among several the one that ends the remaining steps first is taken. A plan
    that cannot go on is left whatever that costs.

    Pure and deterministic: equal arguments give equal plans, on any machine.

    Args:
        profile: as for `search`.
        cluster: as for `search`.
        options: as for `search`. A plan in force that they forbid cannot go on.
        current: the plan in force.
        boundary: index of the first active layer from now on.
        remaining_steps: optimizer steps until the boundary changes again if that is
            known, else until the end.
        pace: wall time of steps so far over their simulated time: pauses are wall
            time, so what a step saves is multiplied by it; thousandths count.
        pauses: what changes have taken so far; None: calibrated defaults.
        elapsed_since_last_ns: time since K or R changed last; None: never.
        hysteresis: what a gain must exceed its price by; thousandths count.
        reshape: ``"priced"``; ``"always"``: whenever a step gets 2 % shorter, without
            a price or a look at devices that hold both plans; ``"never"``: only when
            the plan in force cannot go on.
        **choices: fields of `SearchOptions`, in place of `options` or instead of some
            of theirs.

    Returns:
        The plan from now on, with the candidates it was compared with; its
        ``transition`` says what was priced and which rule decided, also when the
        offer was refused.

    Raises:
        InfeasiblePlan: nothing fits, or the plan in force cannot go on and no other
            can be reached.
        TypeError: a count or a cut is no integer.
        ValueError: an option that no plan can satisfy; the text names it.
    """
    wire.check_int(remaining_steps, "remaining_steps")
    if elapsed_since_last_ns is not None:
        wire.check_int(elapsed_since_last_ns, "elapsed_since_last_ns")
    wire.check_choice(reshape, "reshape", RESHAPE_MODES)
    terms = Terms(
        remaining_steps=remaining_steps,
        pace_permille=_permille(pace, "pace"),
        pauses=PauseModel() if pauses is None else pauses,
        since_last_ns=elapsed_since_last_ns,
        hysteresis_permille=_permille(hysteresis, "hysteresis"),
        reshape=reshape,
    )
    asked = asked_for(options, choices)
    best = search(profile, cluster, asked, boundary=boundary)
    staying, why_not = _plan_in_force(profile, cluster, asked, current, boundary)
    places = Places(profile, cluster, asked, boundary)
    market = Market(places, current, staying, why_not, terms)
    others = _others(profile, cluster, asked, current, best, staying)
    offers = [market.price(candidate) for candidate in others]
    if market.pick(offers) is None and any(each.offer.crowded for each in offers):
        rest = _without_new_replicas(profile, cluster, asked, current, boundary)
        offers += [market.price(c) for c in rest if c not in others]
    return _settle(profile, cluster, asked, best, staying, market, offers)


def _permille(value: float, what: str) -> int:
    """Return a factor of up to 1000 in thousandths."""
    factor = wire.check_float(value, what)
    if factor > 1000:
        raise ValueError(f"{what}: expected at most 1000, got {value}")
    return round(factor * 1000)


def _plan_in_force(
    profile: Profile,
    cluster: Cluster,
    asked: SearchOptions,
    current: Plan,
    boundary: int,
) -> tuple[Plan | None, str]:
    """Return the plan in force at `boundary`, or why it cannot go on there."""
    why_not = asked.forbid(current, len(profile.layers) - boundary, cluster)
    if why_not:
        return None, why_not
    cuts = asked.cuts or _binding.planner_clipped_cuts(list(current.cuts), boundary)
    same = asked.like(current)
    same = dataclasses.replace(same, cuts=None if cuts is None else tuple(cuts))
    try:
        plan = search(profile, cluster, same, boundary=boundary)
    except InfeasiblePlan as error:
        missing = str(error).partition("; ")[2] or str(error)
        return None, f"{short(current)} cannot go on: {missing}"
    if plan.num_replicas != current.num_replicas:
        return None, f"{short(current)} cannot go on: its replicas do not fit any more"
    return plan, ""


def _others(
    profile: Profile,
    cluster: Cluster,
    asked: SearchOptions,
    current: Plan,
    best: Plan,
    staying: Plan | None,
) -> list[Candidate]:
    """Return what is on offer: the best of all, and the best with this K and R."""
    found = list(best.candidates)
    num_active = len(profile.layers) - best.boundary
    if not asked.forbid(current, num_active, cluster):
        same = dataclasses.replace(
            asked, num_stages=current.num_stages, max_replicas=current.num_replicas
        )
        with contextlib.suppress(InfeasiblePlan):  # then this K and R has no offer
            found += search(profile, cluster, same, boundary=best.boundary).candidates
    kept = [] if staying is None else [_identity(staying)]
    unique: list[Candidate] = []
    for candidate in found:
        if _identity(candidate) not in kept:
            kept.append(_identity(candidate))
            unique.append(candidate)
    return unique


def _without_new_replicas(
    profile: Profile,
    cluster: Cluster,
    asked: SearchOptions,
    current: Plan,
    boundary: int,
) -> list[Candidate]:
    """Return what processes that have the model can run: one replica per node."""
    kept = min(cluster.num_nodes, current.num_replicas)
    if asked.max_replicas is not None:
        kept = min(kept, asked.max_replicas)
    fewer = dataclasses.replace(asked, max_replicas=kept)
    with contextlib.suppress(InfeasiblePlan):
        return list(search(profile, cluster, fewer, boundary=boundary).candidates)
    return []


def _identity(plan: Plan | Candidate) -> tuple[object, ...]:
    return plan.shape, plan.cuts, plan.schedule, plan.prefix, plan.cache


def _settle(
    profile: Profile,
    cluster: Cluster,
    asked: SearchOptions,
    best: Plan,
    staying: Plan | None,
    market: Market,
    offers: list[Priced],
) -> Plan:
    """Return the plan that the decisions lead to, with its record."""
    taken = market.pick(offers)
    if taken is not None:
        plan, transition = best, market.transition(taken)
        if _identity(taken.candidate) != _identity(best):
            exact = asked.exactly(taken.candidate)
            plan = search(profile, cluster, exact, boundary=best.boundary)
    elif staying is None:
        rules = [market.rule(each) for each in offers]
        raise InfeasiblePlan(
            "plan: expected one that can be reached, got none; " + "; ".join(rules),
            rules,
        )
    else:
        plan = staying
        shortest = min(
            offers, key=lambda each: each.candidate.simulated_step_ns, default=None
        )
        if shortest is None or shortest.verdict.gain_ns_per_step <= 0:
            transition = market.nothing_better(staying)
        else:
            transition = market.transition(shortest)
    reasons = best.reasons
    if plan is not best:
        shape = (plan.num_stages, plan.num_replicas)
        used, idle = plan.bytes_per_stage, plan.idle_devices
        reasons = tuple(_reasons.use(used, shape, cluster, asked.max_replicas, idle))
    decided = {_identity(each.candidate): market.rule(each) for each in offers}
    return _recorded(plan, best, transition, (transition.rule, *reasons), decided)


def _recorded(
    plan: Plan,
    best: Plan,
    transition: Transition,
    reasons: tuple[str, ...],
    rules: Mapping[tuple[object, ...], str],
) -> Plan:
    """Return `plan` with the decision, and with what it was compared with."""
    mine = Candidate(
        num_stages=plan.num_stages,
        num_replicas=plan.num_replicas,
        num_microbatches=plan.num_microbatches,
        cuts=plan.cuts,
        schedule=plan.schedule,
        prefix=plan.prefix,
        cache=plan.cache,
        predicted_step_ns=plan.predicted_step_ns,
        lower_bound_ns=plan.lower_bound_ns,
        simulated_step_ns=plan.simulated_step_ns,
    )
    others = [
        dataclasses.replace(c, lost=_lost(c, plan, rules.get(_identity(c), "")))
        for c in best.candidates
        if _identity(c) != _identity(plan)
    ]
    candidates = (mine, *others)[: max(len(best.candidates), 1)]
    return dataclasses.replace(
        plan,
        transition=transition,
        candidates=candidates,
        refusals=best.refusals,
        reasons=reasons,
        plan_hash=-1,
    )


def _lost(candidate: Candidate, plan: Plan, rule: str) -> str:
    """Return why `plan` was chosen and not `candidate`."""
    if candidate.simulated_step_ns < plan.simulated_step_ns:
        return rule or "the plan in force stays"
    if candidate.simulated_step_ns == plan.simulated_step_ns:
        return "equal step time"
    slower = candidate.simulated_step_ns - plan.simulated_step_ns
    permille = slower * 1000 // max(plan.simulated_step_ns, 1)
    return f"{permille // 10}.{permille % 10} % slower"
