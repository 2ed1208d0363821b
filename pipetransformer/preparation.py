"""Prepares a change of plan on a thread of its own, while training goes on.

What the thread does changes nothing that a training step looks at: it exchanges
messages over the store and connects the new group next to the live one. The training
thread waits for it where the plan is to take effect, which is the same step on every
active rank, however long the preparation takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from pipetransformer.autodp import ActiveGroup, PeerFailure
from pipetransformer.proposal import Proposal
from pipetransformer.run.context import Run
from pipetransformer.transformation import Prepared, drop, prepare

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
