"""The state machine of a change of plan.

::

    decide -> plan -> prepare -> commit -> move -> rewire -> resume
                         |
                         +-----> abort: go on with the old plan

All ranks pass through `prepare`, then `conclude`, standby ranks too. Until COMMIT
everything new is built next to what is in use, and nothing of the old plan is touched;
so an abort leaves the run as it was, and training may go on meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipetransformer.autodp import (
    ActiveGroup,
    MissingKeptGroup,
    PeerFailure,
    PlanAgreement,
    Unreachable,
)
from pipetransformer.planner import Plan
from pipetransformer.replica.replica import Replica
from pipetransformer.report import Phases
from pipetransformer.run.context import Run
from pipetransformer.run.plan_in_force import PlanInForce
from pipetransformer.state.state import (
    Integrity,
    UnreadableState,
    require_sendable,
)
from pipetransformer.transformation.proposal import Proposal
from pipetransformer.transformation.rewire import move, rewire

_LOG = logging.getLogger(__name__)

_CONNECTING = 0.8
"""Of the protocol's deadline, from the receipt of the plan: who waits for a member in
vain must still say so by the writer's deadline, or would be taken for missing, too.
The rest is for those that receive the plan late; nobody knows by how much it is."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of `conclude` on one rank.

    Attributes:
        committed: False: the old plan stays in force.
        proposal: What was proposed.
        replica: What this rank now drives; None on a standby.
        phases: Seconds per phase on this rank; see `Phases`.
        reason: Why it was aborted; empty when it was not.
        culprits: Ranks without which it might have been committed, equal on every rank.
        moved_bytes: State that new replicas were given; known to the members.
        group: Where the members' group is from: "fresh", "cached" or "same".
    """

    committed: bool
    proposal: Proposal
    replica: Replica | None
    phases: dict[str, float]
    reason: str = ""
    culprits: tuple[int, ...] = ()
    moved_bytes: int = 0
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What PREPARE led to on one rank; nothing of the old plan is touched yet.

    Attributes:
        transition: This rank's part in the change.
        proposal: What was proposed.
        committed: The decision, equal on every rank.
        group: The members' group; None on other ranks, and where there is none.
        is_new: The group is not the live one.
        phases: Seconds per phase so far.
    """

    transition: PlanAgreement
    proposal: Proposal
    committed: bool
    group: ActiveGroup | None
    is_new: bool
    phases: Phases

    def at_switch(self, place: Mapping[str, Any]) -> Prepared:
        """Return it with the plan's place in time; see `Proposal.at_switch`."""
        return dataclasses.replace(self, proposal=self.proposal.at_switch(place))

    def as_ahead(self, **pause: float) -> Prepared:
        """Return it with its phases so far as ``"ahead"``, no part of the pause.

        Args:
            pause: Seconds of phases that are part of it.
        """
        seconds = self.phases.seconds
        ahead = {f"ahead{n.removeprefix('prepare')}": s for n, s in seconds.items()}
        seconds.clear()
        seconds.update(ahead, **pause)
        return self


def prepare(
    run: Run,
    live: ActiveGroup | None,
    plan_epoch: int,
    proposal: Proposal | None,
    participants: Sequence[int],
) -> Prepared:
    """Build what may fail alongside what is in use, and wait for the decision.

    It changes nothing that a training step looks at, and may run alongside one.

    Args:
        run: The run.
        live: The group that this rank trains in now; None on a standby.
        plan_epoch: Counter of the proposed plan.
        proposal: The plan, on the rank that writes it; the others receive it.
        participants: Ranks whose acknowledgement counts, equal on every rank.

    Raises:
        PeerFailure: a rank died.
    """
    phases = Phases()
    built = Built()
    with phases.phase("prepare"):
        transition = PlanAgreement(
            run.plane,
            plan_epoch,
            writer=proposal is not None,
            participants=participants,
            timeout=run.config.autodp.protocol_timeout,
        )
        with phases.phase("announce"):
            if proposal is not None:
                transition.announce(proposal.to_bytes())
            else:
                proposal = Proposal.from_bytes(transition.receive())
            patience = run.config.autodp.protocol_timeout * _CONNECTING
            until = time.monotonic() + patience.total_seconds()
            met = transition.meet()
        if met:

            def given_up() -> bool:
                return transition.is_decided() or time.monotonic() > until

            built = _build(run, live, proposal, given_up, phases)
        group = built.group
        is_new = group is not None and group is not live
        try:
            needs_cache = proposal.plan.boundary > 0 and proposal.caches
            if group is not None and needs_cache:
                run.caches.make_training(proposal.layout, proposal.plan.boundary)
            if met:
                with phases.phase("acknowledge"):
                    transition.acknowledge(built.refusal, waited=built.waited)
            with phases.phase("decision"):
                committed = transition.decide(adopts=False)
        except PeerFailure:
            # Any other error ends this rank, which tells the others why: the group
            # must not close before, and goes with the last reference to it.
            if group is not None and is_new:
                run.groups.reject(group)
            raise
    return Prepared(transition, proposal, committed, group, is_new, phases)


def conclude(run: Run, current: Replica | None, prepared: Prepared) -> Outcome:
    """Go over to a committed plan; drop what was built for an aborted one.

    Args:
        run: The run.
        current: What this rank drives now; None on a standby.
        prepared: From `prepare`.

    Returns:
        The outcome, equal on every rank except for the replica.

    Raises:
        PeerFailure: a rank died.
        RuntimeError: what was committed cannot be carried out here.
    """
    transition, proposal = prepared.transition, prepared.proposal
    phases, group = prepared.phases, prepared.group
    run.plane.set_epoch(proposal.plan_epoch)
    # An aborted number is never used again.
    run.in_force = dataclasses.replace(run.in_force, plan_epoch=proposal.plan_epoch)
    if prepared.committed:
        transition.adopt()
        source = _take_over(run, current, group)
        replica, moved = _carry_out(run, current, proposal, group, phases)
        return Outcome(
            True, proposal, replica, phases.seconds, moved_bytes=moved, group=source
        )
    drop(run, prepared)
    culprits = (*transition.missing, *transition.refused)
    return Outcome(
        False, proposal, current, phases.seconds, transition.reason, culprits
    )


def drop(run: Run, prepared: Prepared) -> None:
    """Take apart what was built for a plan that will not be carried out."""
    if prepared.group is not None and prepared.is_new:
        run.groups.reject(prepared.group)


def _take_over(run: Run, current: Replica | None, group: ActiveGroup | None) -> str:
    """Make the new group the live one and keep the old; return where it is from."""
    if current is not None and current.group is group:
        return "same"
    cached = group is not None and run.groups.take(group)
    if group is None:
        return ""
    return "cached" if cached else "fresh"


def _carry_out(
    run: Run,
    current: Replica | None,
    proposal: Proposal,
    group: ActiveGroup | None,
    phases: Phases,
) -> tuple[Replica | None, int]:
    """Go from the old plan to the committed one; there is no way back.

    Returns:
        What this rank now drives, and the bytes that its group moved.
    """
    try:
        if current is not None:
            current.retire(keep_group=True)
            if group is not current.group:
                run.groups.keep(current.group)
        # Of the plan before, and of what a script did before the first one.
        run.arguments.model.zero_grad(set_to_none=True)
        _adopt(run, proposal)
        plan = proposal.plan if group is not None else None
        run.placement.release(plan, proposal.plan_epoch)
        if group is None:
            run.state.become(Integrity.OLD)
            run.give_back_memory()
            return None, 0
        had, receives = run.state.holds, run.info.rank in proposal.receivers
        if receives:
            run.state.become(Integrity.RECEIVING)
        with phases.phase("move"):
            plan, frozen = proposal.plan, run.frozen_places(proposal.plan)
            run.placement.take(plan, frozen, proposal.plan_epoch, proposal.absent)
            moved = move(run, group, proposal.source, proposal.receivers, phases)
        with phases.phase("rewire"):
            if _needs_less(current, plan):
                run.give_back_memory()
            replica = rewire(run, group, proposal)
        # Who trained in this pass has counts of its own until it receives others'.
        waits = receives and not had and proposal.position is not None
        run.state.become(Integrity.AWAITS_PROGRESS if waits else Integrity.WHOLE)
        return replica, moved
    except (PeerFailure, torch.OutOfMemoryError):
        raise  # of memory another plan may take less
    except Exception as error:
        run.plane.check()
        raise RuntimeError(
            f"plan epoch {proposal.plan_epoch}: expected to carry out a committed plan "
            f"({proposal.plan.describe()}), got {type(error).__name__}: {error}"
        ) from error


@dataclasses.dataclass(frozen=True)
class Built:
    """What building led to: the members' group, if there is one, or a refusal."""

    group: ActiveGroup | None = None
    refusal: str | None = None
    waited: bool = False  # it refuses since others kept it waiting


def _build(
    run: Run,
    live: ActiveGroup | None,
    proposal: Proposal,
    given_up: Callable[[], bool],
    phases: Phases,
) -> Built:
    """Build what may fail alongside what is in use; an error becomes a refusal."""
    if run.info.rank not in proposal.layout.active:
        return Built()
    if proposal.source == run.info.rank and proposal.receivers and not proposal.ahead:
        try:
            require_sendable(run.state)
        except UnreadableState as error:
            return Built(refusal=str(error))
    if live is not None and run.in_force.layout == proposal.layout:
        group = live
    else:
        try:
            with phases.phase("group"):
                group = run.groups.obtain(
                    proposal.group,
                    proposal.layout.active,
                    fresh=proposal.fresh_group,
                    build=functools.partial(
                        run.build_group,
                        num_stages=proposal.plan.num_stages,
                        given_up=given_up,
                    ),
                )
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            run.plane.check()
            _LOG.warning("plan epoch %d: no group: %s", proposal.plan_epoch, error)
            waited = isinstance(error, Unreachable | MissingKeptGroup)
            return Built(refusal=f"{type(error).__name__}: {error}", waited=waited)
    return Built(group)


def _needs_less(current: Replica | None, plan: Plan) -> bool:
    """Tell whether other processes may need what this one has held so far.

    Measuring, before the first plan, took the whole model; another K or R takes another
    part of it.
    """
    if current is None:
        return plan.num_stages > 1
    return current.plan.shape[:2] != plan.shape[:2]


def _adopt(run: Run, proposal: Proposal) -> None:
    """Take over counters and policy state; the lead's own are already these."""
    run.state.load_progress(proposal.progress)
    if run.first_step is None:
        run.first_step = run.state.step
    run.state.frozen_units = proposal.frozen_units
    run.policy.load_state_dict(dict(proposal.policy))
    run.costs.load(proposal.pauses)
    if run.state.losses is not None and run.info.rank in proposal.receivers:
        run.state.losses.take()  # what it added when it was last active
    run.in_force = PlanInForce(
        plan=proposal.plan,
        layout=proposal.layout,
        cache_slots=proposal.cache_slots,
        admission=proposal.admission,
        plan_epoch=proposal.plan_epoch,
    )


def withdraw(run: Run, plan_epoch: int) -> None:
    """Go back to before the first plan, after the loss of ranks.

    Args:
        run: The run.
        plan_epoch: The highest number that any survivor knows.
    """
    run.in_force = PlanInForce(plan_epoch=plan_epoch)
