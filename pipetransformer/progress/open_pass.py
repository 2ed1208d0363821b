"""The pass that is being counted, as plans come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from torch import nn

from pipetransformer.autodp import ActiveGroup, broadcast_tensors
from pipetransformer.data import Batch
from pipetransformer.device import bring
from pipetransformer.progress.counts import Counts, Pass
from pipetransformer.progress.sharding import (
    EpochSharding,
    Loading,
    asking_ahead,
    one_ahead,
)
from pipetransformer.replica.role import Role
from pipetransformer.report import EpochRecord
from pipetransformer.run.context import Run
from pipetransformer.run.layout import Layout
from pipetransformer.transformation import records
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.proposal import Proposal


class OpenPass:
    """Counts on this rank, and hands the counts on when the plan changes.

    Args:
        run: The run.
        role: This rank's place.
        changes: Is told what a first step took.

    Attributes:
        counted: The pass so far; None between passes and on a standby.
        due_at: The batch before which a plan takes effect that is being prepared, or
            was until a rank was lost; equal on every active rank. None: no such plan.
    """

    def __init__(self, run: Run, role: Role, changes: Changes) -> None:
        self._run = run
        self._role = role
        self._changes = changes
        self._loading: Loading | None = None
        self._layout: Layout | None = None  # of the open segment
        self._begins = False  # this rank has seen the pass begin, and nothing of it
        self.counted: Pass | None = None
        self.due_at: int | None = None

    def begin(self, loading: Loading, *, counts: bool) -> None:
        """Begin a pass.

        Args:
            loading: What the user asked for.
            counts: Whether this rank is active; a standby may join later.
        """
        self._loading, self._begins, self.due_at = loading, counts, None
        if counts:
            self._take(Pass())

    def drop(self) -> None:
        """Forget the pass: it is recorded, or this rank stands by from here on."""
        self._take(None)
        self.due_at = None
        self._run.state.hand_out(None)

    def _take(self, counted: Pass | None) -> None:
        self.counted = counted
        self._run.state.learn_progress()

    def _in_force(self) -> Layout:
        layout = self._run.in_force.layout
        if layout is None:
            raise RuntimeError("pass without a plan; please report")
        return layout

    def _counting(self) -> Pass:
        if self.counted is None:
            raise RuntimeError("segment of no pass; please report")
        return self.counted

    def _sharding(self) -> EpochSharding:
        """Return how samples are divided in this pass."""
        if self._loading is None:
            raise RuntimeError("samples of no pass; please report")
        state, run = self._run.state, self._run
        return EpochSharding(
            self._loading,
            run.config.seed,
            state.epoch,
            state.pass_nodes,
            by_home=run.device_cache_bytes > 0,
        )

    # -- what is loaded --------------------------------------------------------

    def batches(self, position: int) -> Generator[Batch, None, None]:
        """Load this replica's share of each batch from `position` on."""
        state, rank = self._run.state, self._run.info.rank
        if (self._begins and position == 0) or not state.pass_nodes:
            state.pass_nodes = len(set(self._in_force().nodes))
        self._begins = False  # a rank that joins the first batch receives the nodes
        shares = self._sharding()
        sampler = shares.sampler(self._in_force(), rank, position)
        loaded, run = shares.loading.batches(sampler), self._run
        if not run.slots.on_host:
            loaded = self._placed_each(loaded)
        prefix = self._role.active().prefix
        if prefix is not None and prefix.fills:
            loaded = one_ahead(loaded, self._note_upcoming, prefix.give_up_ahead)
        if not run.caches.reads_disk("train"):
            return loaded
        view = state.epoch % (shares.loading.views or 1)

        def ask(ids: Sequence[int]) -> None:
            if run.in_force.uses_disk:  # which may change within the segment
                run.caches.prefetch("train", ids, view)

        return asking_ahead(loaded, list(sampler), ask)

    def _note_upcoming(self, batch: Batch | None) -> None:
        self._run.upcoming = batch

    def load(self, number: int) -> Batch:
        """Load this replica's present share of one batch."""
        shares, rank = self._sharding(), self._run.info.rank
        batch = shares.loading.one(shares.sampler(self._in_force(), rank, number))
        return self._placed(batch)

    def _placed(self, batch: Batch) -> Batch:
        """Return a batch with its targets where the outputs will be."""
        last = self._role.active().pipe.devices[-1]
        targets = bring(batch.targets, last)
        same = targets is batch.targets
        return batch if same else dataclasses.replace(batch, targets=targets)

    def _placed_each(
        self, loaded: Generator[Batch, None, None]
    ) -> Generator[Batch, None, None]:
        with contextlib.closing(loaded):
            for batch in loaded:
                yield self._placed(batch)

    # -- what is counted -------------------------------------------------------

    def open_segment(self) -> None:
        """Count from here on under the plan in force; nothing if one is open."""
        run, replica, counted = self._run, self._role.active(), self._counting()
        if counted.open is None:
            counted.open = Counts(run, replica, records.shape_of(run, replica.plan))
            self._layout = self._in_force()

    def close_segment(self) -> None:
        """Add up the open segment, if any; collective over the active group."""
        counted = self._counting()
        if counted.open is not None:
            counted.open.settle()
            counted.open.read()  # of a device, where a step is as long as its next one
            extra_s = counted.open.first_step_extra_s()
            if self._changes.is_fresh:
                counted.open.first_step_seconds = extra_s or 0.0
            per_step = self._run.config.accumulation_steps
            self._run.costs.record_steps(
                self._role.active().plan,
                counted.open.batch_seconds(per_step),
                first_step=counted.open.first_step,
            )
            counted.close_segment(self._run, self._role.active())
            self._changes.note_first_step(extra_s)

    def record(self) -> dict[str, Any]:
        """Return the pass's record as plain values, once every segment is closed."""
        return dataclasses.asdict(self._counting().record(self._run))

    def settle_buffers(self) -> None:
        """Give every replica the buffers of replica 0.

        DDP sends them before each forward only, so after the last step of a pass
        running statistics differ; frozen or evaluated so, replicas would be different
        models. Those of frozen layers were settled before they froze, and may be on the
        host in one replica and on a device in another.
        """
        replica = self._role.active()
        active = list(self._run.arguments.model)[replica.plan.boundary :]
        buffers = list(nn.Sequential(*active).buffers())
        if replica.group.size > 1 and buffers:
            broadcast_tensors(replica.group, buffers, source=0)

    # -- another plan ----------------------------------------------------------

    def hand_over(self, proposal: Proposal) -> None:
        """Give ranks that have become active the pass so far; collective."""
        replica = self._role.replica
        if replica is None:
            self.drop()
            return
        if not proposal.receivers:
            return
        group, own = replica.group, b""
        source = group.members.index(proposal.source)
        if group.rank == source and self.counted is not None:
            own = self.counted.to_bytes()
        given = group.all_gather_bytes(own)[source]
        if self._run.info.rank in proposal.receivers:
            self._take(Pass.from_bytes(given) if given else None)
        self.hand_records(proposal)

    def hand_records(self, proposal: Proposal) -> None:
        """Give ranks that join the records so far; collective.

        Each of them may lead later, when those that have the records are lost.
        """
        replica = self._role.replica
        if replica is not None and proposal.receivers:
            members = replica.group.members
            self._give_records(replica.group, members.index(proposal.source))

    def take_over(self, source: int) -> None:
        """Go on with the pass and the records of one member; collective.

        Args:
            source: Its index in the group.
        """
        group = self._role.active().group
        own = b""
        if group.rank == source and self.counted is not None:
            own = self.counted.to_bytes()
        given = group.all_gather_bytes(own)[source]
        self._take(Pass.from_bytes(given) if given else None)
        if given:
            self.open_segment()
        self._give_records(group, source)

    def _give_records(self, group: ActiveGroup, source: int) -> None:
        """Give the records so far, since a rank that stood by may lead from here on.

        Only those that some member lacks: a run has many changes of plan, and each
        would cost more than the one before.
        """
        epochs = self._run.history.epochs
        lengths = group.all_gather_bytes(str(len(epochs)).encode())
        # Of the last record that all have, an evaluation may have come later.
        first = max(0, min(map(int, lengths)) - 1)
        missing = [dataclasses.asdict(record) for record in epochs[first:]]
        told = json.dumps(missing).encode() if group.rank == source else b""
        told = group.all_gather_bytes(told)[source]
        records = [EpochRecord.from_fields(fields) for fields in json.loads(told)]
        if len(epochs) < first + len(records):
            epochs[first:] = records

    def report(self) -> tuple[int, dict[str, Any]]:
        """Return the number of finished segments, and the counts of the open one."""
        counted = self.counted
        if counted is None:
            return 0, {}
        if counted.open is None:
            return len(counted.segments), {}
        now = counted.open
        counts = {**now.mine(self._run), "batches": now.batches, "due": now.due()}
        return len(counted.segments), counts

    def abandon_segment(self, counts: list[Mapping[str, Any]]) -> None:
        """End the open segment without its group, on the rank that is ahead.

        The samples of lost replicas follow from the sampler: every replica counted
        its share of the same batches.

        Args:
            counts: Of the survivors that counted the same batches, this rank's among
                them.
        """
        run, counted = self._run, self.counted
        if counted is None or counted.open is None:
            return
        if self._layout is None or not counted.open.batches:
            counted.open = None
            return
        ids = self._sharding().ids_of(self._layout, counted.open.batches)
        replica = self._role.replica
        record = counted.open.record(run, replica, counts, samples=len(ids))
        counted.append(record, ids)
