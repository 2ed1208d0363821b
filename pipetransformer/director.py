"""Takes one rank through the script: epochs, passes, evaluations, transformations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipetransformer import evaluation, persistence, records
from pipetransformer.autodp import PeerFailure, broadcast_tensors
from pipetransformer.autosave import AutoSave
from pipetransformer.data import ElasticSampler
from pipetransformer.layout import Layout
from pipetransformer.planning import agree_on_profile, propose, take_decision
from pipetransformer.proposal import Proposal
from pipetransformer.report.console import epoch_line
from pipetransformer.run import Run, Workload
from pipetransformer.training import Pass
from pipetransformer.transformation import Outcome, Replica, perform

_LOG = logging.getLogger(__name__)


class Director:
    """The rank's present place: lead, other active rank, or standby.

    Before the first plan rank 0 leads alone and every other rank stands by.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.replica: Replica | None = None
        self.autosave = AutoSave(run)
        self._pass: Pass | None = None
        self._left = True
        self._last_pass_epoch = -1
        self._fresh: dict[str, float] | None = None  # phases of the change before

    @property
    def is_lead(self) -> bool:
        """True on the rank that writes messages, plans and files."""
        return self.run.info.rank == 0

    def active(self) -> Replica:
        """Return this rank's replica.

        Raises:
            ValueError: the rank stands by, or no plan is in force.
        """
        if self.replica is None:
            raise ValueError(
                f"rank {self.run.info.rank}: expected an active rank, got a standby "
                "(batches yields nothing there) or a call before the first pass"
            )
        return self.replica

    @property
    def has_plan(self) -> bool:
        """True once a plan has been committed."""
        return self.run.layout is not None

    @property
    def _stands_by(self) -> bool:
        return self.replica is None and not self.is_lead

    # -- epochs and passes -----------------------------------------------------

    def begin_epoch(self, count: int) -> int | None:
        """Pass an epoch boundary; transform the run if the plan changes.

        Returns:
            The epoch that begins, or None when all are done.
        """
        run = self.run
        with run.guarded(), run.clock.phase("transformation"):
            if self._stands_by:
                message = run.script.follow("epoch", or_finish=True)
                epoch = message.get("epoch")
                if message["kind"] == "finish" or epoch is None:
                    return None
                run.state.epoch = int(epoch)
                if message["plan_epoch"] is not None:
                    self._take_part(int(message["plan_epoch"]), None, 0.0)
                return run.state.epoch
            if run.state.epoch >= count:
                self._tell("epoch", epoch=None, plan_epoch=None)
                return None
            start = time.perf_counter()
            proposal = propose(run, self.replica) if self.has_plan else None
            plan_epoch = proposal.plan_epoch if proposal is not None else None
            self._tell("epoch", epoch=run.state.epoch, plan_epoch=plan_epoch)
            if proposal is not None:
                self._take_part(proposal.plan_epoch, proposal, start)
            return run.state.epoch

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
            start = time.perf_counter()
            with run.clock.phase("transformation"):
                proposal = propose(run, self.replica) if self.is_lead else None
                outcome = self._take_part(run.plan_epoch + 1, proposal, start)
        if not self.has_plan:
            raise PeerFailure(
                None,
                "PREPARE",
                epoch=run.plan_epoch,
                reason=f"the first plan was refused: {outcome.reason}",
            )

    def begin_pass(
        self, num_samples: int, batch_size: int, drop_last: bool
    ) -> ElasticSampler | None:
        """Return the sampler of this replica; on a standby wait for the pass's end.

        Raises:
            ValueError: a second pass in one epoch, or one over other batches than
                those that the plan was made for.
        """
        run = self.run
        if self._stands_by:
            with run.guarded():
                run.script.follow("pass_end")
            return None
        layout, workload = run.layout, run.workload
        if layout is None or workload is None:
            raise RuntimeError("pass without a plan; please report")
        if self._last_pass_epoch == run.state.epoch:
            raise ValueError(
                f"batches: expected one pass per epoch, got a second in epoch "
                f"{run.state.epoch}; loop over engine.epochs(n)"
            )
        given = (num_samples, batch_size, drop_last)
        planned = tuple(workload.describe().values())
        if given != planned:
            raise ValueError(
                "batches: expected the samples, batch size and drop_last of the first "
                f"pass, {planned}, got {given}"
            )
        self._last_pass_epoch = run.state.epoch
        with run.clock.phase("pass"):
            return self._open_pass(layout, num_samples, batch_size, drop_last)

    def _open_pass(
        self, layout: Layout, num_samples: int, batch_size: int, drop_last: bool
    ) -> ElasticSampler:
        run = self.run
        share, index = layout.node_share(run.info.rank)
        # Nodes without a replica own no samples; R never falls below the others.
        nodes = sorted(set(layout.nodes))
        sampler = ElasticSampler(
            num_samples,
            batch_size,
            seed=run.config.seed,
            num_nodes=len(nodes),
            node=nodes.index(run.info.node),
            replicas_on_node=share,
            replica_on_node=index,
            drop_last=drop_last,
        )
        sampler.set_epoch(run.state.epoch)
        sampler.set_position(run.state.batch)
        replica = self.active()
        if replica.prefix is not None:
            replica.prefix.refresh()
        run.freezer.train(True)
        self._left = False
        self._pass = run.current_pass = Pass(
            run, replica, records.shape_of(run, replica.plan)
        )
        return sampler

    def begin_batch(self, index: int) -> None:
        """Note that the user gets a batch: what came before it is done."""
        if self.is_lead:
            self.autosave.between_batches(self.active())
        self.run.batch_in_hand = index

    def leave_pass(self) -> None:
        """Note that the loop over the pass has ended, in whatever way."""
        self._left = True

    def finish_pass(self) -> None:
        """Reduce and record the pass that was left open, if any.

        It is called by the next engine call and not by the loop itself: a loop that
        ends in an exception must not meet its peers in a collective.
        """
        run, counted = self.run, self._pass
        if counted is None:
            return
        self._pass = run.current_pass = run.batch_in_hand = None
        with run.guarded(), run.clock.phase("pass"):
            record = counted.close(run, self.active())
            self._note_first_step(counted.first_step_extra_s())
            run.prices.record_pace(
                record.pipeline_seconds_per_step(), record.predicted_step_ns
            )
            self._settle_buffers()
            run.history.epochs.append(record)
            self._tell("pass_end")
        if self.is_lead:
            _LOG.info("%s", epoch_line(record))

    def _note_first_step(self, seconds: float | None) -> None:
        """Tell the prices what the first step after a change of plan took more."""
        phases, self._fresh = self._fresh, None
        if phases is not None and seconds is not None:
            phases["first_step"] = seconds
            self.run.prices.record_first_step(seconds)

    def _settle_buffers(self) -> None:
        """Give every replica the buffers of replica 0.

        DDP sends them before each forward only, so after the last step of a pass
        running statistics differ; frozen or evaluated so, replicas would be different
        models.
        """
        group, buffers = self.active().group, list(self.run.recipe.model.buffers())
        if group.size > 1 and buffers:
            broadcast_tensors(group, buffers, source=0)

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
        run = self.run
        within = self._pass is not None and not self._left
        if not within:
            self.finish_pass()
        result: dict[str, float]
        with run.guarded(), run.clock.phase("evaluate"):
            if self._stands_by:
                result = run.script.follow("evaluate")["metrics"]
            else:
                if within:
                    self._settle_buffers()
                result = evaluation.evaluate(
                    run, self.active(), dataset, metrics, name=name, collate=collate
                )
                if within:
                    return result
                self._tell("evaluate", metrics=result)
        run.state.metrics = dict(result)
        if run.history.epochs:
            run.history.epochs[-1].metrics.update(result)
        return result

    def finish(self) -> None:
        """Tell the standby ranks that the script has ended."""
        self.finish_pass()
        if not self._stands_by:
            self._tell("finish")

    def close(self) -> None:
        """Drop the replica; safe after a failure."""
        if self.replica is not None:
            self.replica.retire(keep_group=False)
            self.replica = None

    def _tell(self, kind: str, **content: Any) -> None:
        if self.is_lead:
            self.run.script.lead(kind, **content)
        else:
            self.run.script.skip()

    # -- plans -----------------------------------------------------------------

    def _take_part(
        self, plan_epoch: int, proposal: Proposal | None, start: float
    ) -> Outcome:
        """Go through one transformation and record it."""
        run, old = self.run, self.replica
        before = records.shape_of(run, old.plan) if old is not None else None
        writer = self.is_lead
        outcome = perform(run, old, plan_epoch, proposal if writer else None)
        self.replica = outcome.replica
        if outcome.committed:
            records.learn(run, outcome, old.plan if old is not None else None)
            self._fresh = outcome.phases
        if writer and outcome.committed:
            run.script.trim()
            seconds = time.perf_counter() - start
            records.record_change(run, outcome, before, seconds)
        elif writer:
            _LOG.warning(
                "plan epoch %d was aborted, the old plan goes on: %s",
                plan_epoch,
                outcome.reason,
            )
        return outcome
