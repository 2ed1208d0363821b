"""Changes of plan that are prepared on a thread of its own while training goes on.

What the thread does changes nothing that a training step looks at: it exchanges
messages over the store and connects the new group next to the live one. The training
thread waits for it where the plan is to take effect, which is the same step on every
active rank, however long the preparation takes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from pipetransformer.autodp import ActiveGroup, PeerFailure
from pipetransformer.replica.role import Role
from pipetransformer.run.context import Run
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.phases import Outcome, Prepared, drop, prepare
from pipetransformer.transformation.proposal import Proposal

_LOG = logging.getLogger(__name__)

_LOOK_S = 0.5  # joins return so often, and signals are handled
_LONGEST_END_S = 10.0  # after a failure, which ends every wait of the thread


class Preparation:
    """One change of plan that is being prepared on this active rank.

    Args:
        run: The run.
        live: The group that this rank trains in.
        proposal: The plan, equal on every active rank.
        writer: Whether this rank writes it; the others read it again from the store.
        participants: Ranks whose acknowledgement counts.
        planned_s: What planning took, in seconds.

    Attributes:
        planned_s: As given.
    """

    def __init__(
        self,
        run: Run,
        live: ActiveGroup,
        proposal: Proposal,
        *,
        writer: bool,
        participants: Sequence[int],
        planned_s: float,
    ) -> None:
        self.planned_s = planned_s
        self._run = run
        self._prepared: Prepared | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._prepare,
            args=(live, proposal, writer, participants),
            name="pt-prepare",
            daemon=True,  # never what a failed process waits for at its end
        )
        self._thread.start()

    def _prepare(
        self,
        live: ActiveGroup,
        proposal: Proposal,
        writer: bool,
        participants: Sequence[int],
    ) -> None:
        own = proposal if writer else None
        try:
            self._prepared = prepare(
                self._run, live, proposal.plan_epoch, own, participants
            )
        except BaseException as error:  # raised again by `wait`, on the main thread
            # Frames would keep the group alive.
            self._error = error.with_traceback(None)
            self._error.__context__ = None

    def wait(self) -> Prepared | None:
        """Wait until every rank has prepared and the decision is there.

        The thread's own waits end by the protocol's deadline or with the run's failure.

        Returns:
            What it led to. Its phase ``"prepare"`` is what was waited for here;
            ``"ahead"`` is the preparation, no part of the pause. None if the store
            was lost meanwhile and this rank goes on without it.

        Raises:
            PeerFailure: a rank died.
            RuntimeError: the plan that was read does not follow the one in force.
        """
        start = time.perf_counter()
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
        plane, error, prepared = self._run.plane, self._error, self._prepared
        plane.check()
        if isinstance(error, PeerFailure) and plane.store_lost:
            return None
        if error is not None:
            raise error
        if prepared is None:
            raise RuntimeError("preparation without a result; please report")
        waited_s = time.perf_counter() - start
        return prepared.as_ahead(plan=self.planned_s, prepare=waited_s)

    def give_up(self) -> None:
        """End it after a failure, and drop what it has built."""
        self._thread.join(_LONGEST_END_S)
        if self._thread.is_alive():
            _LOG.warning("the preparation of a plan did not end with its generation")
        elif self._prepared is not None:
            drop(self._run, self._prepared)
            self._prepared = None


class Ahead:
    """At most one change of plan that is being prepared on this active rank.

    Args:
        run: The run.
        role: This rank's place.
        changes: Takes this rank through changes of plan.
    """

    def __init__(self, run: Run, role: Role, changes: Changes) -> None:
        self._run = run
        self._role = role
        self._changes = changes
        self._preparation: Preparation | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a plan is being prepared, or waits to take effect."""
        return self._preparation is not None

    def begin(self, position: int) -> bool:
        """Plan, and let a thread prepare it; on every active rank.

        Args:
            position: The next batch.

        Returns:
            Whether the plan will change.
        """
        start, replica = time.perf_counter(), self._role.active()
        proposal = self._changes.propose(position)
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

    def switch(self, start: float, position: int) -> Outcome | None:
        """Go over to the plan that was prepared ahead; on every active rank.

        Args:
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
        return self._changes.carry_out(prepared, start - planned, position)

    def _tell_switch(self, position: int, goes: bool) -> bool:
        """Tell the standby ranks, which have seen COMMIT, where the plan begins.

        Args:
            position: The batch before which it takes effect.
            goes: False: it does not, they are to forget it.

        Returns:
            Whether it takes effect: not where the lead could not tell them.
        """
        lead, place = self._role.is_lead, self._place(position)
        told = self._run.control_log.tell("switch", lead=lead, goes=goes, **place)
        return self._changes.all_say(told) and goes

    def _place(self, position: int) -> dict[str, Any]:
        """Return what a plan says of its place in time, see `Proposal.at_switch`."""
        run = self._run
        return {
            "progress": run.state.counters(),
            "policy": run.policy.state_dict(),
            "pauses": run.costs.state(),
            "operations": run.control_log.done,
            "position": position,
        }

    def give_up(self) -> None:
        """Drop what is being prepared; after a failure, or without the store."""
        ahead, self._preparation = self._preparation, None
        if ahead is not None:
            ahead.give_up()
