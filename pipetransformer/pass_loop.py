"""One pass over the training set on this rank: opening, yielding, closing.

The plan may change between two batches (``Config.freeze_every``). Then the segment of
the pass that ran under the old plan is added up over the old group, and every active
rank of the new plan goes on at the next batch with a new sampler.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from pipetransformer import records
from pipetransformer.accounting import Counts, Pass
from pipetransformer.autodp import broadcast_tensors
from pipetransformer.autosave import AutoSave
from pipetransformer.changes import Changes
from pipetransformer.data import Batch, ElasticSampler, batches
from pipetransformer.layout import Layout
from pipetransformer.operations import Operations
from pipetransformer.planning import is_due, propose, take_decision
from pipetransformer.proposal import Proposal
from pipetransformer.report import EpochRecord, epoch_line
from pipetransformer.role import Role
from pipetransformer.run import Run

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loading:
    """What the user asked the batches of a pass to be; see ``engine.batches``."""

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    pin_memory: bool
    drop_last: bool

    def batches(self, sampler: ElasticSampler) -> Generator[Batch, None, None]:
        """Load what the sampler names."""
        return batches(
            self.dataset,
            sampler,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )


class PassLoop:
    """The pass that runs now, or was left open.

    Args:
        run: The run.
        role: This rank's place.
        changes: Takes this rank through changes of plan.
        operations: Counts what the active ranks have done.
        autosave: Writes checkpoints between two batches.
    """

    def __init__(
        self,
        run: Run,
        role: Role,
        changes: Changes,
        operations: Operations,
        autosave: AutoSave,
    ) -> None:
        self._run = run
        self._role = role
        self._changes = changes
        self._operations = operations
        self._autosave = autosave
        self._pass: Pass | None = None
        self._running = False
        self._last_epoch = -1

    @property
    def is_within(self) -> bool:
        """True between two batches of a loop that goes on."""
        return self._pass is not None and self._running

    def iterate(self, loading: Loading) -> Iterator[Batch]:
        """Yield this replica's batches; on a standby wait for the pass's end.

        Raises:
            ValueError: a second pass in one epoch, or one over other batches than
                those that the plan was made for.
        """
        run, role = self._run, self._role
        position = run.state.batch
        if not role.stands_by:
            self._check(loading)
            self._pass = run.current_pass = Pass()
        self._running = True
        try:
            while True:
                if role.stands_by:
                    joined = self._stand_by()
                    if joined is None:
                        return
                    position = joined
                    self._last_epoch = run.state.epoch
                changed = False
                for batch in self._segment(loading, position):
                    if role.is_lead:
                        self._autosave.between_batches(role.active())
                    run.batch_in_hand = batch.index
                    yield batch
                    position = batch.index + 1
                    if self._changes_at(position):
                        changed = True
                        break
                if not changed:
                    return
        finally:
            self._running = False

    def finish(self) -> None:
        """Reduce and record the pass that was left open, if any.

        It is called by the next engine call and not by the loop itself: a loop that
        ends in an exception must not meet its peers in a collective.
        """
        run, counted = self._run, self._pass
        if counted is None:
            return
        with run.guarded(), run.clock.phase("pass"):
            record = EpochRecord.from_fields(
                self._operations.run(lambda: self._close(counted))
            )
            self._drop()
            run.prices.record_pace(
                record.pipeline_seconds_per_step(), record.predicted_step_ns
            )
            run.history.epochs.append(record)
            run.script.tell("pass_end", lead=self._role.is_lead)
        if self._role.is_lead:
            _LOG.info("%s", epoch_line(record))

    def settle_buffers(self) -> None:
        """Give every replica the buffers of replica 0.

        DDP sends them before each forward only, so after the last step of a pass
        running statistics differ; frozen or evaluated so, replicas would be different
        models.
        """
        group = self._role.active().group
        buffers = list(self._run.recipe.model.buffers())
        if group.size > 1 and buffers:
            broadcast_tensors(group, buffers, source=0)

    # -- one segment -----------------------------------------------------------

    def _check(self, loading: Loading) -> None:
        run, workload = self._run, self._run.workload
        if workload is None:
            raise RuntimeError("pass without a plan; please report")
        if self._last_epoch == run.state.epoch:
            raise ValueError(
                f"batches: expected one pass per epoch, got a second in epoch "
                f"{run.state.epoch}; loop over engine.epochs(n)"
            )
        given = (len(loading.dataset), loading.batch_size, loading.drop_last)
        planned = tuple(workload.describe().values())
        if given != planned:
            raise ValueError(
                "batches: expected the samples, batch size and drop_last of the first "
                f"pass, {planned}, got {given}"
            )
        self._last_epoch = run.state.epoch

    def _segment(self, loading: Loading, position: int) -> Iterator[Batch]:
        run, replica, counted = self._run, self._role.active(), self._pass
        if run.layout is None or counted is None:
            raise RuntimeError("segment of no pass; please report")
        with run.clock.phase("pass"):
            sampler = self._sampler(run.layout, loading, position)
            if replica.prefix is not None:
                replica.prefix.refresh()
            run.freezer.train(True)
            self._open(counted)
        return run.clock.each("data", loading.batches(sampler))

    def _open(self, counted: Pass) -> None:
        run, replica = self._run, self._role.active()
        counted.open = Counts(run, replica, records.shape_of(run, replica.plan))

    def _sampler(
        self, layout: Layout, loading: Loading, position: int
    ) -> ElasticSampler:
        run = self._run
        share, index = layout.node_share(run.info.rank)
        # Nodes without a replica own no samples; R never falls below the others.
        nodes = sorted(set(layout.nodes))
        node: int | None = nodes.index(run.info.node)
        if position == 0:
            run.state.pass_nodes = len(nodes)
        owners = run.state.pass_nodes or len(nodes)
        if owners != len(nodes):  # the pass was begun by other nodes
            active = layout.active
            node, share, index = None, len(active), active.index(run.info.rank)
        sampler = ElasticSampler(
            len(loading.dataset),
            loading.batch_size,
            seed=run.config.seed,
            num_nodes=owners,
            node=node,
            replicas_on_node=share,
            replica_on_node=index,
            drop_last=loading.drop_last,
        )
        sampler.set_epoch(run.state.epoch)
        sampler.set_position(position)
        return sampler

    def _close_segment(self, counted: Pass) -> None:
        if counted.open is not None:
            extra_s = counted.open.first_step_extra_s()
            counted.close_segment(self._run, self._role.active())
            self._changes.note_first_step(extra_s)

    def _close(self, counted: Pass) -> dict[str, Any]:
        self._close_segment(counted)
        self.settle_buffers()
        return dataclasses.asdict(counted.record(self._run))

    # -- between two batches ---------------------------------------------------

    def _changes_at(self, position: int) -> bool:
        """Decide at a step boundary; True if another plan is in force now."""
        run = self._run
        if position >= run.state.num_batches or not is_due(run):
            return False
        with run.guarded(), run.clock.phase("transformation"):
            return self._operations.run(lambda: self._decide(position))

    def _decide(self, position: int) -> bool:
        run, counted, start = self._run, self._pass, time.perf_counter()
        if counted is None:
            raise RuntimeError("step boundary of no pass; please report")
        take_decision(run)

        def plan(absent: tuple[int, ...]) -> Proposal | None:
            proposal = propose(
                run,
                self._role.active(),
                absent=absent,
                operations=self._operations.done + 1,
                position=position,
            )
            if proposal is not None:
                self.settle_buffers()
                self._close_segment(counted)
            return proposal

        outcome = self._changes.carry_out(plan, start)
        if outcome is None or not outcome.committed:
            if counted.open is None:
                self._open(counted)
            return False
        self._hand_over(outcome.proposal, counted)
        return True

    def _hand_over(self, proposal: Proposal, counted: Pass | None) -> None:
        """Give ranks that have become active the pass so far."""
        run, replica = self._run, self._role.replica
        if replica is None:
            self._drop()
            return
        if not proposal.receivers:
            return
        group, own = replica.group, b""
        source = group.members.index(proposal.source)
        if group.rank == source and counted is not None:
            own = counted.to_bytes()
        given = group.all_gather_bytes(own)[source]
        if run.info.rank in proposal.receivers:
            self._pass = run.current_pass = Pass.from_bytes(given)

    def _drop(self) -> None:
        run = self._run
        self._pass = run.current_pass = run.batch_in_hand = None

    def _stand_by(self) -> int | None:
        """Wait for the pass's end; return the next batch if this rank trains on."""
        run = self._run
        with run.guarded(), run.clock.phase("stand by"):
            if self._changes.follow("pass_end", "plan") is not None:
                return None
            proposal = self._changes.joined
            if proposal is None or proposal.position is None:
                raise RuntimeError("active within a pass at no batch; please report")
            self._hand_over(proposal, None)
            return proposal.position
