"""Takes one rank through the script: epochs, passes, evaluations, transformations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from pipetransformer import evaluation, persistence, training
from pipetransformer.autodp import PeerFailure
from pipetransformer.autosave import AutoSave
from pipetransformer.changes import Changes
from pipetransformer.data import Batch
from pipetransformer.operations import Operations
from pipetransformer.pass_loop import Loading, PassLoop
from pipetransformer.planning import agree_on_profile, propose, take_decision
from pipetransformer.proposal import Proposal
from pipetransformer.recipe import Workload
from pipetransformer.replica import Replica
from pipetransformer.report import profiled
from pipetransformer.role import Role
from pipetransformer.run import Run


class Director:
    """Every engine call at which ranks meet, in the order of the user's script.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.autosave = AutoSave(run)
        self._role = Role(run)
        self._operations = Operations()
        self._changes = Changes(run, self._role, self._operations)
        self._passes = PassLoop(
            run, self._role, self._changes, self._operations, self.autosave
        )

    @property
    def is_lead(self) -> bool:
        """True on the rank that writes messages, plans and files."""
        return self._role.is_lead

    @property
    def has_plan(self) -> bool:
        """True once a plan has been committed."""
        return self.run.layout is not None

    @property
    def replica(self) -> Replica | None:
        """What this rank drives; None on a standby."""
        return self._role.replica

    def active(self) -> Replica:
        """Return this rank's replica.

        Raises:
            ValueError: the rank stands by, or no plan is in force.
        """
        return self._role.active()

    # -- epochs ----------------------------------------------------------------

    def first_plan(self, workload: Workload) -> None:
        """Profile on the lead and put the first plan in force, on all ranks."""
        run = self.run
        run.workload = workload
        run.state.num_batches = workload.num_batches
        with run.guarded():
            if self.is_lead:
                persistence.check_resumed_pass(run)
            with run.clock.phase("profile"):
                agree_on_profile(run, lead=self.is_lead)
            # The protocol's deadline begins when every rank has come here.
            run.plane.gather("first plan", b"", phase="before the first plan")
            with run.clock.phase("transformation"):
                reason = self._operations.run(self._plan_first)
        if not self.has_plan:
            raise PeerFailure(
                None,
                "PREPARE",
                epoch=run.plan_epoch,
                reason=f"the first plan was refused: {reason}",
            )

    def _plan_first(self) -> str:
        """Return why there is no plan; empty if there is one."""
        run, reason = self.run, ""
        if self._role.stands_by:
            message = self._changes.follow("ready", "plan")
            if message is not None:
                return str(message["reason"])
        else:
            start = time.perf_counter()
            outcome = self._changes.carry_out(self._propose, start)
            if outcome is not None and not outcome.committed:
                reason = outcome.reason
        run.script.tell("ready", lead=self.is_lead, reason=reason)
        return reason

    def begin_epoch(self, count: int) -> int | None:
        """Pass an epoch boundary; transform the run if the plan changes.

        Returns:
            The epoch that begins, or None when all are done.
        """
        run = self.run
        with run.guarded(), run.clock.phase("transformation"):
            if self._role.stands_by:
                message = self._changes.follow("epoch", "finish", "plan")
                if message is not None:
                    epoch = message.get("epoch")  # none where the run finishes
                    if epoch is not None:
                        run.state.epoch = int(epoch)
                    return None if epoch is None else run.state.epoch
            elif run.state.epoch >= count:
                run.script.tell("epoch", lead=self.is_lead, epoch=None)
                return None
            elif self.has_plan:
                self._operations.run(self._change_at_epoch)
            run.script.tell("epoch", lead=self.is_lead, epoch=run.state.epoch)
            return run.state.epoch

    def _change_at_epoch(self) -> bool:
        start = time.perf_counter()
        outcome = self._changes.carry_out(self._propose, start)
        return outcome is not None and outcome.committed

    def _propose(self, absent: tuple[int, ...]) -> Proposal | None:
        done = self._operations.done + 1
        return propose(self.run, self.replica, absent=absent, operations=done)

    def end_epoch(self, epoch: int) -> None:
        """Close the epoch: decide about the next one, then save."""
        self.finish_pass()
        run = self.run
        run.state.epoch, run.state.batch = epoch + 1, 0
        if self.replica is not None:
            with run.clock.phase("pass"):
                take_decision(run)
        if self.is_lead:
            self.autosave.after_epoch(self.replica)

    # -- passes ----------------------------------------------------------------

    def batches(self, loading: Loading) -> Iterator[Batch]:
        """Yield this replica's part of each batch, then record the pass."""
        yield from self._passes.iterate(loading)
        self.finish_pass()

    def finish_pass(self) -> None:
        """Reduce and record the pass that was left open, if any."""
        self._passes.finish()

    def step(self, batch: Batch | Any, targets: Any = None) -> Tensor:
        """Take one training step; see `training.step`."""
        replica = self.active()
        with profiled("step"):
            return self._operations.run(
                lambda: training.step(self.run, replica, batch, targets), shared=False
            )

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, evaluation.Metric],
        name: str,
        collate: Callable[[list[Any]], Any] | None,
    ) -> dict[str, float]:
        """Evaluate on the active ranks; a standby waits for the result.

        In the middle of a pass only the active ranks come here, and the result is
        theirs alone.
        """
        run, within = self.run, self._passes.is_within
        if not within:
            self.finish_pass()

        def body() -> dict[str, float]:
            if within:
                self._passes.settle_buffers()
            return evaluation.evaluate(
                run, self.active(), dataset, metrics, name=name, collate=collate
            )

        with run.guarded(), run.clock.phase("evaluate"):
            if self._role.stands_by:
                message = run.script.follow("evaluate")
                result: dict[str, float] = message["metrics"]
            else:
                result = self._operations.run(body)
                if within:
                    return result
                run.script.tell("evaluate", lead=self.is_lead, metrics=result)
        run.state.metrics = dict(result)
        if run.history.epochs:
            run.history.epochs[-1].metrics.update(result)
        return result

    # -- the end ---------------------------------------------------------------

    def finish(self) -> None:
        """Tell the standby ranks that the script has ended."""
        self.finish_pass()
        if not self._role.stands_by:
            self.run.script.tell("finish", lead=self.is_lead)

    def close(self) -> None:
        """Drop the replica; safe after a failure."""
        self._role.retire()
