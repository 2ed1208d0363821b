"""Where the plan changes within a pass: between two batches.

With `Config.freeze_every` a decision falls to a step boundary, and the plan changes
there. With `Config.prepare_steps` every change is two boundaries: at the first one the
active ranks plan, and a thread of each prepares the plan; at the second one, a fixed
number of steps later, they go over to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.recovery.retrying import RetriedCalls
from pipetransformer.replica.role import Role
from pipetransformer.run.context import Run
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.background import Ahead
from pipetransformer.transformation.freeze_decision import (
    gather_losses,
    is_due,
    share_signals,
    take_decision,
)
from pipetransformer.transformation.phases import Outcome
from pipetransformer.transformation.proposal import Proposal


class StepBoundaries:
    """One rank's part in the changes of plan of the pass that runs.

    Args:
        run: The run.
        role: This rank's place.
        changes: Takes this rank through changes of plan.
        ahead: Prepares them while training goes on.
        calls: Makes the calls that need other ranks.
        open_pass: What is counted.
    """

    def __init__(
        self,
        run: Run,
        role: Role,
        changes: Changes,
        ahead: Ahead,
        calls: RetriedCalls,
        open_pass: OpenPass,
    ) -> None:
        self._run = run
        self._role = role
        self._changes = changes
        self._calls = calls
        self._open = open_pass
        self._ahead = ahead
        self._steps_ahead = run.config.prepare_steps

    # -- on active ranks -------------------------------------------------------

    def at_start(self) -> None:
        """Plan for the pass that begins, unless the run has just begun with a plan."""
        run, state = self._run, self._run.state
        planned = run.began_at == (state.step, state.decided_epoch)
        if self._steps_ahead and not self._role.stands_by and not planned:
            self._meet(lambda: self._begin_ahead(0))

    def at(self, position: int) -> None:
        """Do what falls to the boundary before batch `position`, if anything does."""
        run, due_at = self._run, self._open.due_at
        # A loop that reads ahead has steps left when its last batch is taken.
        if self._role.stands_by or run.state.batch >= run.state.num_batches:
            return
        if due_at is not None:
            # Gradients that wait for a later batch's optimizer step would be dropped.
            if run.state.batch >= due_at:
                self._meet(lambda: self._switch(position))
        elif is_due(run) or self._turns(position):
            begins = self._begin_ahead if self._steps_ahead else self._change
            self._meet(lambda: begins(position))

    def _turns(self, position: int) -> bool:
        """Tell whether another plan is tried out from batch `position` on."""
        state, trial = self._run.state, self._run.costs.trial
        whole = state.batch == position  # no gradients wait for a later batch
        return trial is not None and whole and trial.turns_at(state.step)

    def at_end(self) -> None:
        """Go over to a plan that was still being prepared when the pass ended."""
        if self._open.due_at is not None:
            self._meet(lambda: self._switch(self._run.state.num_batches))
            if not self._role.stands_by:
                self._open.open_segment()  # as on ranks that have just joined

    def _meet(self, body: Callable[[], bool]) -> None:
        self._run.tell_step()
        with self._run.clock.phase("transformation"):
            self._calls.call("boundary", body)

    def _begin_ahead(self, position: int) -> bool:
        run = self._run
        self._decide()
        if not self._changes.are_possible():
            return False
        begun = self._ahead.begin(position)
        if begun:
            last = run.state.num_batches
            self._open.due_at = min(position + self._steps_ahead, last)
        return begun

    def _switch(self, position: int) -> bool:
        """Go over to what was prepared; after the loss of a rank, plan again."""
        start = time.perf_counter()
        if not self._ahead.is_under_way:
            changed = self._change(position)
        else:
            self._pause_pass()
            outcome = self._ahead.switch(start, position)
            changed = self._resume_pass(outcome)
        self._open.due_at = None
        return changed

    def _change(self, position: int) -> bool:
        """Decide, plan and change the plan, while training stands still."""
        start = time.perf_counter()
        self._decide()
        if not self._changes.are_possible():
            return False
        if self._turns(position):
            self._open.close_segment()  # what its steps took is what plans are tried by
            gather_losses(self._run, self._role.active())
        proposal = self._changes.propose(position)
        if proposal is None:
            return self._resume_pass(None)
        self._pause_pass()
        return self._resume_pass(self._changes.carry_out(proposal, start, position))

    def _decide(self) -> None:
        """Take the freeze decision, if one is due; on every active rank."""
        if is_due(self._run):
            if self._open.counted is not None:
                self._open.counted.settle()
                self._open.counted.catch_up()
            share_signals(self._run, self._role.active())
        take_decision(self._run)

    def _pause_pass(self) -> None:
        self._open.settle_buffers()
        self._open.close_segment()

    def _resume_pass(self, outcome: Outcome | None) -> bool:
        if outcome is None or not outcome.committed:
            self._open.open_segment()
            return False
        self._open.hand_over(outcome.proposal)
        return True

    # -- on standby ranks ------------------------------------------------------

    def stand_by(self, call: str = "pass") -> int | None:
        """Wait for the pass's end; return the next batch if this rank trains on.

        Args:
            call: Where the script is, as `decision.assess` knows it.
        """
        with self._run.clock.phase("stand by"):
            while True:
                if self._calls.follow("pass_end", "plan", call=call) is not None:
                    return None
                joined = self._changes.joined
                if joined is None or joined.position is None:
                    raise RuntimeError(
                        "active within a pass at no batch; please report"
                    )
                if not self._calls.recovered:
                    self._complete(joined, joined.position)
                if not self._role.stands_by:
                    return joined.position

    def _complete(self, joined: Proposal, position: int) -> None:
        """Complete the operation that the others change the plan in."""
        waiting: list[Proposal] = [joined]

        def complete() -> bool:
            if waiting:
                self._open.hand_over(waiting.pop())
                return True
            return self._switch(position)

        self._calls.call("boundary", complete)
