"""Changes of plan that are prepared while training goes on: begun, and taken over."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from pipetransformer.changes import Changes, Proposer
from pipetransformer.preparation import Preparation
from pipetransformer.replica.role import Role
from pipetransformer.report import profiled
from pipetransformer.run.context import Run
from pipetransformer.run.control_log import Operations
from pipetransformer.transformation import Outcome


class Ahead:
    """At most one change of plan that is being prepared on this active rank.

    Args:
        run: The run.
        role: This rank's place.
        operations: Counts what the active ranks have done.
        changes: Takes this rank through changes of plan.
    """

    def __init__(
        self, run: Run, role: Role, operations: Operations, changes: Changes
    ) -> None:
        self._run = run
        self._role = role
        self._operations = operations
        self._changes = changes
        self._preparation: Preparation | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a plan is being prepared, or waits to take effect."""
        return self._preparation is not None

    def begin(self, propose: Proposer) -> bool:
        """Plan, and let a thread prepare it; on every active rank.

        Returns:
            Whether the plan will change.
        """
        start, replica = time.perf_counter(), self._role.active()
        with profiled("plan"):
            proposal = propose(())
        if proposal is None:
            return False
        self._changes.tell_plan(proposal)
        self._preparation = Preparation(
            self._run,
            replica.group,
            dataclasses.replace(proposal, ahead=True),
            writer=self._role.is_lead,
            participants=self._run.plane.members,
            planned_s=time.perf_counter() - start,
        )
        return True

    def switch(self, propose: Proposer, start: float, position: int) -> Outcome | None:
        """Go over to the plan that was prepared ahead; on every active rank.

        Args:
            propose: Plans again if that one was aborted.
            start: A ``time.perf_counter()`` from which the pause counts.
            position: The batch before which it takes effect.

        Returns:
            As `carry_out`; None also if the store was lost meanwhile.
        """
        ahead = self._preparation
        prepared = ahead.wait() if ahead is not None else None
        goes = self._changes.all_say(prepared is not None)
        if not goes or prepared is None or prepared.committed:
            goes = self._tell_switch(position, goes)
        if not goes or prepared is None:
            self.give_up()
            return None
        prepared = prepared.at_switch(self._place(position))
        self._preparation = None
        planned = prepared.phases.seconds["plan"]
        return self._changes.carry_out(propose, start - planned, prepared)

    def _tell_switch(self, position: int, goes: bool) -> bool:
        """Tell the standby ranks, which have seen COMMIT, where the plan begins.

        Args:
            position: The batch before which it takes effect.
            goes: False: it does not, they are to forget it.

        Returns:
            Whether it takes effect: not where the lead could not tell them.
        """
        lead, place = self._role.is_lead, self._place(position)
        told = self._run.script.tell("switch", lead=lead, goes=goes, **place)
        return self._changes.all_say(told) and goes

    def _place(self, position: int) -> dict[str, Any]:
        """Return what a plan says of its place in time, see `Proposal.at_switch`."""
        run = self._run
        return {
            "progress": run.state.counters(),
            "policy": run.policy.state_dict(),
            "pauses": run.prices.state(),
            "operations": self._operations.done,
            "position": position,
        }

    def give_up(self) -> None:
        """Drop what is being prepared; after a failure, or without the store."""
        ahead, self._preparation = self._preparation, None
        if ahead is not None:
            ahead.give_up()
