"""Other plans, priced against the plan in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer import _C
from pipetransformer.planner import _transition_text
from pipetransformer.planner._places import Places
from pipetransformer.planner.candidate import Candidate
from pipetransformer.planner.change_terms import ChangeTerms
from pipetransformer.planner.pauses import native_model, terms_of, total_ns
from pipetransformer.planner.plan import Plan
from pipetransformer.planner.transition import Transition

_RESHAPES = {
    "priced": _C.planner.Reshape.PRICED,
    "always": _C.planner.Reshape.ALWAYS,
    "never": _C.planner.Reshape.NEVER,
}
_KINDS = {
    _C.planner.TransitionKind.NONE: "none",
    _C.planner.TransitionKind.BOUNDARY: "boundary",
    _C.planner.TransitionKind.CUTS: "cuts",
    _C.planner.TransitionKind.SHAPE: "shape",
}


@dataclass(frozen=True, kw_only=True)
class Priced:
    """One other plan, what it would take, and the decision about it."""

    candidate: Candidate
    offer: _C.planner.Offer
    verdict: _C.planner.Verdict
    moves: _C.planner.Moves
    terms_ns: dict[str, int]


class Pricing:
    """Prices candidates against the plan in force and picks one.

    Args:
        places: profile and cluster, at the new boundary.
        current: the plan in force.
        staying: the same at the new boundary; None when it cannot go on.
        why_not: why it cannot; empty when it can.
        terms: what prices depend on besides.
    """

    def __init__(
        self,
        places: Places,
        current: Plan,
        staying: Plan | None,
        why_not: str,
        terms: ChangeTerms,
    ) -> None:
        self._places = places
        self._current = current
        self._staying = staying
        self._why_not = why_not
        self._terms = terms
        self._model = native_model(terms.pauses)
        self._before = places.in_force(current)
        self._anyway: dict[str, int] = {}
        if staying is not None and staying.boundary != current.boundary:
            self._anyway = self._pause(staying)[1]

    def price(self, candidate: Candidate) -> Priced:
        """Return what the change to `candidate` takes, and the decision."""
        moves, terms_ns, kind = self._pause(candidate)
        offer = _C.planner.Offer()
        offer.kind = kind
        if self._staying is not None:
            offer.step_in_force_ns = self._staying.simulated_step_ns
        offer.step_ns = candidate.simulated_step_ns
        offer.remaining_steps = self._terms.remaining_steps
        offer.pace_permille = self._terms.pace_permille
        offer.pause_ns = total_ns(terms_ns)
        offer.anyway_ns = total_ns(self._anyway)
        offer.hysteresis_permille = self._terms.hysteresis_permille
        offer.since_last_ns = self._terms.elapsed_since_last_ns
        offer.crowded = moves.crowded is not None
        offer.reshape = _RESHAPES[self._terms.reshape]
        return Priced(
            candidate=candidate,
            offer=offer,
            verdict=_C.planner.decide(offer),
            moves=moves,
            terms_ns=terms_ns,
        )

    def pick(self, offers: Sequence[Priced]) -> Priced | None:
        """Return the accepted offer that leaves most time, None if there is none."""
        best = _C.planner.best_offer(
            [each.offer for each in offers], [each.verdict for each in offers]
        )
        return None if best is None else offers[best]

    def rule(self, priced: Priced) -> str:
        """Return the rule that decided about an offer, as a sentence."""
        staying = self._staying
        return _transition_text.sentence(
            priced.offer,
            priced.verdict,
            name=self._name(priced.candidate),
            staying=self._why_not if staying is None else staying.name,
            crowded=priced.moves.crowded,
            memory_bytes=self._places.cluster.device_memory_bytes,
        )

    def transition(self, priced: Priced) -> Transition:
        """Return the record of a decision."""
        verdict = priced.verdict
        return Transition(
            kind=_KINDS[priced.offer.kind],
            offered=self._name(priced.candidate),
            terms_ns=priced.terms_ns,
            anyway_terms_ns=self._anyway,
            pause_ns=priced.offer.pause_ns,
            gain_ns_per_step=verdict.gain_ns_per_step,
            pace_permille=self._terms.pace_permille,
            remaining_steps=self._terms.remaining_steps,
            pay_back_steps=verdict.pay_back_steps,
            accepted=verdict.accepted,
            rule=self.rule(priced),
            moved_bytes=priced.moves.replica_bytes,
        )

    def nothing_better(self, staying: Plan) -> Transition:
        """Return the record of a decision without an offer."""
        moved = staying.boundary != self._current.boundary
        return Transition(
            kind="boundary" if moved else "none",
            offered=staying.name,
            terms_ns=self._anyway,
            anyway_terms_ns=self._anyway,
            pause_ns=total_ns(self._anyway),
            remaining_steps=self._terms.remaining_steps,
            rule=_transition_text.nothing_better(staying.name, moved),
        )

    def _name(self, candidate: Candidate) -> str:
        """Return a candidate in short, with its cuts where only these differ."""
        staying, name = self._staying, candidate.name
        if staying is not None and name == staying.name:
            return f"{name} cut at {list(candidate.cuts[1:-1])}"
        return name

    def _pause(
        self, plan: Plan | Candidate
    ) -> tuple[_C.planner.Moves, dict[str, int], _C.planner.TransitionKind]:
        places, before = self._places, self._before
        after = places.placement(plan)
        moves = _C.planner.moves(places.profile, places.cluster, before, after)
        kind = _C.planner.transition_kind(before, after, self._same_order(plan))
        reshapes = kind == _C.planner.TransitionKind.SHAPE
        lost = places.lost_cache_bytes(plan) if reshapes else 0
        pause = _C.planner.predicted_pause(
            self._model, places.cluster, kind, moves, lost
        )
        return moves, terms_of(pause), kind

    def _same_order(self, plan: Plan | Candidate) -> bool:
        """Tell whether schedule, placement of the prefix and tier stay."""
        current = self._current
        same = plan.schedule == current.schedule
        if current.boundary == 0 or self._places.boundary == 0:
            return same
        return same and (plan.prefix, plan.cache) == (current.prefix, current.cache)
