"""The plan for a new boundary, and whether it is worth changing more than that."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from pipetransformer import _C
from pipetransformer.planner import _reasons
from pipetransformer.planner._offers import Priced, Pricing
from pipetransformer.planner._places import Places
from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.change_terms import ChangeTerms
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.layer_profile import Profile
from pipetransformer.planner.options import SearchOptions, merged
from pipetransformer.planner.plan import Plan
from pipetransformer.planner.search import InfeasiblePlan, search
from pipetransformer.planner.transition import Transition
from pipetransformer.planner.trial import corrected, slower

_Find: TypeAlias = Callable[[SearchOptions], Plan]


def replan(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions | None = None,
    terms: ChangeTerms | None = None,
    *,
    current: Plan,
    boundary: int,
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
        terms: what prices depend on besides the plans.
        current: the plan in force.
        boundary: index of the first active layer from now on.
        **choices: fields of `SearchOptions` and `ChangeTerms`, in place of `options`
            and `terms` or instead of some of theirs.

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
    of_terms = {entry.name for entry in dataclasses.fields(ChangeTerms)} & {*choices}
    terms = merged(ChangeTerms, terms, {n: choices.pop(n) for n in of_terms})
    asked = merged(SearchOptions, options, choices)
    find = _finder(profile, cluster, boundary, terms)
    best = find(asked)
    why_not = asked.forbid(current, len(profile.layers) - boundary, cluster)
    others = list(best.candidates)
    staying = None
    if not why_not:
        staying, why_not = _plan_in_force(find, asked, current, boundary)
        same = dataclasses.replace(
            asked,
            num_stages=current.num_stages,
            max_replicas=current.num_replicas,
            replicas="all",
        )
        others += _candidates(find, same)
    others = _unlike(staying, others)
    places = Places(profile, cluster, asked, boundary)
    pricing = Pricing(places, current, staying, why_not, terms)
    offers = [pricing.price(candidate) for candidate in others]
    if pricing.pick(offers) is None and any(each.offer.crowded for each in offers):
        most = cluster.num_nodes * cluster.devices_per_node
        if asked.max_replicas is not None:
            most = min(most, asked.max_replicas)
        # What processes that have the model can run: one replica per node.
        numbers = [min(cluster.num_nodes, current.num_replicas, most)]
        if staying is None:  # it ends the run, or whatever can be reached goes on
            numbers += [*range(most, 0, -1)]
        for number in dict.fromkeys(numbers):
            fewer = dataclasses.replace(asked, max_replicas=number)
            seen = [each.candidate for each in offers]
            rest = _candidates(find, fewer)
            offers += [pricing.price(c) for c in rest if c not in seen]
            if pricing.pick(offers) is not None:
                break
    return _settle(find, cluster, asked, best, staying, pricing, offers)


def try_out(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    terms: ChangeTerms,
    candidate: Candidate,
    *,
    current: Plan,
    boundary: int,
    rule: str,
) -> Plan | None:
    """Plan to run one candidate, whatever a change to it costs.

    Args:
        profile: as for `search`.
        cluster: as for `search`.
        options: as for `search`.
        terms: what prices depend on besides the plans.
        candidate: what is to be run.
        current: the plan in force.
        boundary: index of the first active layer, of both.
        rule: why, as a sentence.

    Returns:
        The plan; None where it does not fit, or no device has room for it beside the
        plan in force.
    """
    most = options.max_replicas
    if most is not None and candidate.num_replicas > most:
        return None
    find = _finder(profile, cluster, boundary, terms)
    narrow = options.exactly(candidate)
    narrow = dataclasses.replace(narrow, cache_tiers=options.cache_tiers)
    try:
        best, plan = find(options), find(narrow)
    except InfeasiblePlan:
        return None
    if (plan.name, plan.cuts) != (candidate.name, candidate.cuts):
        return None
    places = Places(profile, cluster, options, boundary)
    pricing = Pricing(places, current, None, rule, terms)
    priced = pricing.price(candidate)
    if priced.moves.crowded is not None:
        return None
    transition = dataclasses.replace(
        pricing.transition(priced), accepted=True, rule=rule
    )
    return _recorded(plan, best, transition, (rule, *plan.reasons[1:]), {})


def _finder(
    profile: Profile, cluster: Cluster, boundary: int, terms: ChangeTerms
) -> _Find:
    """Return a search whose step times are those that the run's factors give."""
    find = functools.partial(search, profile, cluster, boundary=boundary)

    def found(options: SearchOptions) -> Plan:
        return corrected(
            find(options), terms.factors, lambda each: find(options.exactly(each))
        )

    return found


def _plan_in_force(
    find: _Find, asked: SearchOptions, current: Plan, boundary: int
) -> tuple[Plan | None, str]:
    """Return the plan in force at `boundary`, or why it cannot go on there."""
    cuts = asked.cuts or _C.planner.clipped_cuts(list(current.cuts), boundary)
    try:
        plan = find(dataclasses.replace(asked.like(current, boundary), cuts=cuts))
    except InfeasiblePlan as error:
        missing = "; ".join(error.refusals) or str(error)
        return None, f"{current.name} cannot go on: {missing}"
    if plan.num_replicas != current.num_replicas:
        return None, f"{current.name} cannot go on: its replicas do not fit any more"
    return plan, ""


def _candidates(find: _Find, options: SearchOptions) -> Sequence[Candidate]:
    """Return what a search compares; none where nothing fits."""
    try:
        return find(options).candidates
    except InfeasiblePlan:
        return ()


def _unlike(staying: Plan | None, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return each candidate once, without the plan in force."""
    unique: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        unique.setdefault(_identity(candidate), candidate)
    if staying is not None:
        unique.pop(_identity(staying), None)
    return list(unique.values())


def _identity(plan: Plan | Candidate) -> tuple[object, ...]:
    return plan.shape, plan.cuts, plan.schedule, plan.prefix, plan.cache


def _settle(
    find: _Find,
    cluster: Cluster,
    asked: SearchOptions,
    best: Plan,
    staying: Plan | None,
    pricing: Pricing,
    offers: list[Priced],
) -> Plan:
    """Return the plan that the decisions lead to, with its record."""
    taken = pricing.pick(offers)
    if taken is not None:
        plan, transition = best, pricing.transition(taken)
        if _identity(taken.candidate) != _identity(best):
            plan = find(asked.exactly(taken.candidate))
    elif staying is None:
        rules = [pricing.rule(each) for each in offers]
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
            transition = pricing.nothing_better(staying)
        else:
            transition = pricing.transition(shortest)
    reasons = best.reasons
    if plan is not best:
        shape = (plan.num_stages, plan.num_replicas)
        used, idle = plan.bytes_per_stage, plan.idle_devices
        compared = [
            (each.num_stages * each.num_replicas, each.simulated_step_ns, each.name)
            for each in best.candidates
        ]
        reasons = (
            *_reasons.more_devices(shape, plan.simulated_step_ns, compared),
            *_reasons.use(used, shape, cluster, asked.max_replicas, idle),
        )
    decided = {_identity(each.candidate): pricing.rule(each) for each in offers}
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
    return slower(candidate, plan.simulated_step_ns)
