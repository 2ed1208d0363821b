"""Takes this rank through changes of plan: with retries, and into the records."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

from pipetransformer.autodp import PeerFailure, announced_epoch, gather_at
from pipetransformer.replica.role import Role
from pipetransformer.report import PlanShape, first_step_line, profiled
from pipetransformer.run.context import Run
from pipetransformer.transformation import records
from pipetransformer.transformation.phases import (
    Outcome,
    Prepared,
    conclude,
    drop,
    prepare,
)
from pipetransformer.transformation.proposal import Proposal
from pipetransformer.transformation.propose import propose

_LOG = logging.getLogger(__name__)

MOST_RETRIES = 3
"""Attempts after the first one."""

_BACK_OFF_S = 0.1


def left_out(
    absent: Collection[int],
    culprits: Collection[int],
    *,
    holders: Collection[int],
    attempt: int,
) -> tuple[int, ...] | None:
    """Return the ranks without which the change is tried again.

    Args:
        absent: The ranks without which it was tried.
        culprits: Who did not come, or refused; may be empty, when nobody knows.
        holders: The ranks that hold the training state.
        attempt: Number of the attempt that was aborted, from 0.

    Returns:
        World ranks, ascending; None: give up, the old plan goes on.
    """
    if attempt >= MOST_RETRIES:
        return None
    without = {*absent, *culprits}
    return tuple(sorted(without)) if set(holders) - without else None


def back_off_s(attempt: int) -> float:
    """Return how long to wait after the aborted attempt `attempt`, in seconds."""
    return _BACK_OFF_S * (attempt + 1)


class Changes:
    """One rank's part in every change of plan.

    Args:
        run: The run.
        role: This rank's place, which changes of plan alter.

    Attributes:
        joined: The change by which this rank became active last.
    """

    def __init__(self, run: Run, role: Role) -> None:
        self._run = run
        self._role = role
        self.joined: Proposal | None = None
        self._fresh: dict[str, float] | None = None  # phases of the change before

    def are_possible(self) -> bool:
        """Tell whether plans can change: with a store; equal on every active rank."""
        return self.all_say(not self._run.plane.store_lost)

    def all_say(self, yes: bool) -> bool:
        """Tell whether every active rank says yes, where ranks outlive the store."""
        run, replica = self._run, self._role.replica
        if replica is None or run.config.autodp.on_peer_failure != "continue":
            return yes
        told = b"1" if yes else b""
        return all(gather_at(replica.group, "a change of plan", told))

    def propose(
        self, position: int | None, absent: tuple[int, ...] = ()
    ) -> Proposal | None:
        """Decide and plan, on every active rank; before the first plan on rank 0.

        Args:
            position: The next batch, within a pass.
            absent: Ranks that must not become active.

        Returns:
            The plan; None if the one in force stays.
        """
        replica, done = self._role.replica, self._run.control_log.done
        with profiled("plan"):
            return propose(
                self._run, replica, absent=absent, operations=done, position=position
            )

    def carry_out(
        self, plan: Proposal | Prepared, start: float, position: int | None = None
    ) -> Outcome | None:
        """Change the plan, on every active rank; before the first plan on rank 0.

        After an ABORT it is tried again without the ranks that were missing or
        refused.

        Args:
            plan: The first attempt: proposed, or prepared already.
            start: A ``time.perf_counter()`` from which the pause counts.
            position: As for `propose`, which makes the further attempts.

        Returns:
            The last attempt's outcome; None if the plan in force stays.
        """
        run, attempt, begun = self._run, 0, start
        absent: tuple[int, ...] = ()
        while True:
            before, writer = self.shape(), self._role.is_lead
            if isinstance(plan, Proposal):
                planned = time.perf_counter() - begun
                self.tell_plan(plan, absent)
                number, own = plan.plan_epoch, plan if writer else None
                plan = self._prepare(number, own, absent)
                plan.phases.seconds["plan"] = planned
            outcome = self._conclude(plan, trims=not absent)
            now = time.perf_counter()
            if outcome.committed:
                records.record_change(
                    run, outcome, before, now - start, attempt=attempt, told=writer
                )
                return outcome
            records.record_abort(
                run, outcome, now - begun, attempt=attempt, told=writer
            )
            without = self._next_absent(absent, outcome, attempt)
            if without is None:
                return outcome
            time.sleep(back_off_s(attempt))
            absent, attempt, begun = without, attempt + 1, time.perf_counter()
            proposal = self.propose(position, absent)
            if proposal is None:
                return None
            plan = proposal

    def tell_plan(self, proposal: Proposal, absent: tuple[int, ...] = ()) -> None:
        """Call the standby ranks to a change of plan; on every active rank."""
        self._run.control_log.tell(
            "plan",
            lead=self._role.is_lead,
            plan_epoch=proposal.plan_epoch,
            absent=list(absent),
        )

    def follow(self, *kinds: str) -> dict[str, Any] | None:
        """Wait for a message of the lead; on the way take part in changes of plan.

        Called by a standby rank.

        Args:
            kinds: As for `ControlLog.follow`; "plan" where the plan may change.

        Returns:
            The message; None when a change of plan has made this rank active.
        """
        run = self._run
        while True:
            # "switch" here is of a change that this rank did not come to, or whose
            # ABORT it knows.
            message = run.control_log.follow(*kinds, "switch")
            if message["kind"] == "switch":
                continue
            if message["kind"] != "plan":
                return message
            plan_epoch, absent = int(message["plan_epoch"]), tuple(message["absent"])
            if plan_epoch <= run.in_force.plan_epoch or self._is_over(plan_epoch):
                continue
            prepared = self._await_switch(self._prepare(plan_epoch, None, absent))
            if prepared is None:
                continue
            outcome = self._conclude(prepared, trims=not absent)
            if outcome.replica is not None:
                # Those who were active are still in the operation that this is part of.
                run.control_log.catch_up(outcome.proposal.operations, None)
                self.joined = outcome.proposal
                return None

    def recover(
        self,
        plan_epoch: int,
        proposal: Proposal | None,
        operations: int,
        result: object,
    ) -> Outcome:
        """Go through the survivors' change of plan.

        Args:
            plan_epoch: Its number.
            proposal: The plan, on the rank that writes it.
            operations: Operations that the rank that is ahead has completed.
            result: What the last of them gave there.
        """
        # After a loss a standby may be behind, and still need messages.
        prepared = self._prepare(plan_epoch, proposal, ())
        outcome = self._conclude(prepared, trims=False)
        if outcome.committed:
            # Together: after another loss this rank may be the one that is ahead.
            self._run.control_log.catch_up(operations, result)
        self.joined = outcome.proposal
        return outcome

    @property
    def is_fresh(self) -> bool:
        """Whether no step of the plan in force has been told of yet."""
        return self._fresh is not None

    def note_first_step(self, seconds: float | None) -> None:
        """Tell the prices what the first step after a change of plan took more."""
        phases, self._fresh = self._fresh, None
        if phases is not None and seconds is not None:
            phases["first_step"] = seconds
            self._run.costs.record_first_step(seconds)
            if self._role.is_lead:
                _LOG.info("%s", first_step_line(self._run.in_force.plan_epoch, seconds))

    def _is_over(self, plan_epoch: int) -> bool:
        """Tell whether so many plans came later that this one's keys are gone.

        That happens to a rank that was left out because it was slow.
        """
        if announced_epoch(self._run.plane) <= plan_epoch + 1:
            return False
        self._run.plane.plan_hash = None  # it may have been committed
        return True

    def _prepare(
        self, plan_epoch: int, proposal: Proposal | None, absent: tuple[int, ...]
    ) -> Prepared:
        replica, everyone = self._role.replica, self._run.plane.members
        return prepare(
            self._run,
            replica.group if replica is not None else None,
            plan_epoch,
            proposal,
            [rank for rank in everyone if rank not in absent],
        )

    def _await_switch(self, prepared: Prepared) -> Prepared | None:
        """Wait on a standby rank until the plan takes effect, if that is later.

        Returns:
            The plan with its place in time; None if it does not take effect.
        """
        if not (prepared.committed and prepared.proposal.ahead):
            return prepared
        try:
            message = self._run.control_log.follow("switch")
        except PeerFailure:
            drop(self._run, prepared)
            raise
        if not message["goes"]:
            drop(self._run, prepared)
            return None
        return prepared.as_ahead().at_switch(message)

    def _conclude(self, prepared: Prepared, *, trims: bool) -> Outcome:
        """Carry the decision out; `trims`: no rank needs earlier messages then."""
        run, role = self._run, self._role
        old, writer = role.replica.plan if role.replica else None, role.is_lead
        outcome = conclude(run, role.replica, prepared)
        role.replica = outcome.replica
        if outcome.committed:
            # After ABORT what was held is held still, for a checkpoint at least.
            active = outcome.replica is not None
            run.plane.outlive_store(active, outcome.proposal.layout.active)
            records.learn(run, outcome, old)
            self._fresh = outcome.phases
            if trims:
                run.control_log.trim(lead=writer)
        else:
            run.history.counters.transformations_aborted += 1
        return outcome

    def _next_absent(
        self, absent: tuple[int, ...], outcome: Outcome, attempt: int
    ) -> tuple[int, ...] | None:
        """Return without whom to try again, equal on every rank."""
        run = self._run
        layout = run.in_force.layout
        holders = layout.active if layout is not None else (0,)
        return left_out(absent, outcome.culprits, holders=holders, attempt=attempt)

    def shape(self) -> PlanShape | None:
        """Return the plan that this rank drives under, for the records."""
        replica = self._role.replica
        return None if replica is None else records.shape_of(self._run, replica.plan)
