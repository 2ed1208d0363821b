"""One pass over the training set on this rank: opening, yielding, closing.

The plan may change between two batches (``Config.freeze_every``), or because a rank
was lost. Then every active rank of the new plan goes on at the next batch with a new
sampler, in a new segment of the pass.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from pipetransformer.checkpoint.autosave import AutoSave
from pipetransformer.data import Batch
from pipetransformer.loop.run_files import write_run_files
from pipetransformer.loop.step_boundaries import StepBoundaries
from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.progress.sharding import Loading
from pipetransformer.recovery.retrying import RetriedCalls
from pipetransformer.replica.replica import Replica
from pipetransformer.replica.role import Role
from pipetransformer.report import EpochRecord, epoch_line
from pipetransformer.run.context import Run
from pipetransformer.transformation.forecast import foresee
from pipetransformer.transformation.freeze_decision import (
    Signals,
    know_signals,
    share_signals,
)

_LOG = logging.getLogger(__name__)


class PassLoop:
    """The pass that runs now, or was left open.

    Args:
        run: The run.
        role: This rank's place.
        boundaries: Changes the plan between two batches.
        calls: Makes the calls that need other ranks.
        open_pass: What is counted.
        autosave: Writes checkpoints between two batches.
    """

    def __init__(
        self,
        run: Run,
        role: Role,
        boundaries: StepBoundaries,
        calls: RetriedCalls,
        open_pass: OpenPass,
        autosave: AutoSave,
    ) -> None:
        self._run = run
        self._role = role
        self._boundaries = boundaries
        self._calls = calls
        self._open = open_pass
        self._autosave = autosave
        self._running = False
        self._in_hand: Batch | None = None
        self._first = 0
        self._last_epoch = -1
        self._keyed: int | None = None  # id of the first set with an input_key
        self._warned_of_keys = False
        self._drawn_for: Replica | None = None
        self._left_open = False  # by a rank that stands by since its last batch

    @property
    def is_within(self) -> bool:
        """True between two batches of a loop that goes on."""
        return self._open.counted is not None and self._running

    def iterate(self, loading: Loading) -> Iterator[Batch]:
        """Yield this replica's batches; on a standby wait for the pass's end.

        Raises:
            ValueError: a second pass in one epoch, or one over other batches than
                those that the plan was made for.
        """
        run, role, position = self._run, self._role, self._run.state.batch
        if not role.stands_by:
            self._check(loading)
        self._open.begin(loading, counts=not role.stands_by)
        self._running, self._left_open = True, not role.stands_by
        self._first = position
        begins = True  # on this rank
        try:
            if position == 0:
                self._boundaries.at_start()
            while True:
                if role.stands_by:
                    joined = self._boundaries.stand_by()
                    if joined is None:
                        self._left_open = False
                        return
                    self._left_open = True
                    position, self._last_epoch = joined, run.state.epoch
                    self._first = joined
                for batch in self._segment(position, begins=begins):
                    self._autosave.between_batches(role)
                    run.state.hand_out(batch.index)
                    self._in_hand = batch
                    yield batch
                    position = batch.index + 1
                    begins = False
                    self._boundaries.at(position)
                    if role.replica is not self._drawn_for:
                        break
                else:
                    return
        finally:
            self._running, self._in_hand = False, None

    @property
    def first(self) -> int:
        """The number of the batch from which on this rank has a part in the pass."""
        return self._first

    @property
    def in_hand(self) -> Batch | None:
        """The batch that the script's loop is at; None outside of a pass."""
        return self._in_hand

    def current(self, batch: Batch) -> Batch:
        """Return the batch with this replica's present share of it."""
        if self._role.replica is self._drawn_for:
            return batch
        return self._open.load(batch.index)

    def finish(self) -> None:
        """Reduce and record the pass that was left open, if any.

        It is called by the next engine call and not by the loop itself: a loop that
        ends in an exception must not meet its peers in a collective.
        """
        run, left_open = self._run, self._left_open
        self._left_open = False
        if self._open.counted is None:
            if not (left_open and self._role.stands_by):
                return
            # The script left the loop right after a recovery at this batch.
        elif self._last_epoch != run.state.epoch:
            return  # a recovery gave it: this rank's script has not begun it yet
        self._boundaries.at_end()
        with run.clock.phase("pass"):
            result = self._close_with_others()
            if result is not None:
                self._record(EpochRecord.from_fields(result["record"]))
                # Of a rank that had closed the pass when another one was lost.
                know_signals(run, Signals(**result["signals"]))
            self._open.drop()

    def _close_with_others(self) -> dict[str, Any] | None:
        """Return what `_close` does; None on a rank that stands by at its end.

        A rank that has left may be taken back: when another is lost right then, the
        others change the plan once more.
        """
        result = None
        while result is None:
            if self._role.stands_by:
                if self._boundaries.stand_by("pass end") is None:
                    return None
                self._open.open_segment()
            result = self._calls.call("close", self._close)
        return result

    # -- one segment -----------------------------------------------------------

    def _check(self, loading: Loading) -> None:
        run, workload = self._run, self._run.inputs.workload
        if workload is None:
            raise RuntimeError("pass without a plan; please report")
        if self._last_epoch == run.state.epoch:
            raise ValueError(
                f"batches: expected one pass per epoch, got a second in epoch "
                f"{run.state.epoch}; loop over engine.epochs(n)"
            )
        given = dataclasses.replace(
            workload,
            num_samples=len(loading.dataset),
            global_batch=loading.batch_size,
            drop_last=loading.drop_last,
            weights=loading.weights_hash,
        )
        if given.describe() != workload.describe():
            raise ValueError(
                "batches: expected the samples, batch size, drop_last and weights of "
                f"the first pass, {workload.describe()}, got {given.describe()}"
            )
        self._check_parameters()
        self._last_epoch = run.state.epoch
        self._watch_keys(loading.dataset)

    def _check_parameters(self) -> None:
        """Refuse parameters that train and were not there when the engine was made.

        Raises:
            ValueError: there is one; replicas would not share its gradient.
        """
        given = self._run.arguments
        known = set(given.parameters)
        for name, parameter in given.model.named_parameters():
            if parameter.requires_grad and parameter not in known:
                raise ValueError(
                    "model: expected all parameters that train when the engine is "
                    f"made, got {name} later; replicas do not share its gradient, and "
                    "checkpoints have no state of it"
                )

    def _watch_keys(self, dataset: Any) -> None:
        """Warn once of another set whose keys may name what the cache has of the first.

        It is of as many samples, and the engine cannot see what is in them.
        """
        if not hasattr(dataset, "input_key") or self._warned_of_keys:
            return
        if self._keyed is None:
            self._keyed = id(dataset)
        elif self._keyed != id(dataset):
            self._warned_of_keys = True
            _LOG.warning(
                "batches: another dataset than before, with an input_key; what the "
                "cache holds under a key is served for it, so a key must be of one "
                "content in all sets of a run"
            )

    def _segment(self, position: int, *, begins: bool) -> Iterator[Batch]:
        run, replica = self._run, self._role.active()
        with run.clock.phase("pass"):
            if replica.prefix is not None:
                views = run.config.cache.views or 1
                replica.prefix.begin_pass(self._records_of_others(replica), views)
                run.caches.begin_pass("train")
            if begins:  # later on modes are the script's
                run.freezer.train(True)
            if run.config.scheduler_interval == "epoch":
                run.state.schedule_epoch()  # resumed where the epoch had not ended
            self._open.open_segment()
            loaded = self._open.batches(position)
        self._drawn_for = replica
        return run.clock.each("data", loaded)

    def _records_of_others(self, replica: Replica) -> tuple[int, int]:
        """Return how many records of other layers there were, and rows asked for.

        Zeros where these cannot be another replica's: there is none, or with a codec,
        which each replica may have judged in its own way.
        """
        cache = self._run.caches.training()
        alone = replica.group.size == 1 or self._run.config.cache.codec != "native"
        if cache is None or alone:
            return 0, 0
        found = cache.counters
        return found.stale, found.hits + found.misses

    def _close(self) -> dict[str, Any]:
        self._open.close_segment()
        signals = share_signals(self._run, self._role.active(), ends=True)
        self._open.settle_buffers()
        told = dataclasses.asdict(signals)
        return {"record": self._open.record(), "signals": told}

    def _record(self, record: EpochRecord) -> None:
        run = self._run
        self._learn(record)
        codec = run.config.cache.codec
        run.costs.cache.observe(record.segments, run.inputs, codec)
        epochs = run.history.epochs
        if not epochs or epochs[-1].epoch != record.epoch:
            # Else a recovery has brought it, from the rank that had closed the pass.
            epochs.append(record)
        run.control_log.tell("pass_end", lead=self._role.is_lead)
        if self._role.is_lead:
            _LOG.info("%s", epoch_line(record))
            if run.arguments.listeners:
                run.forecast = foresee(run, self._role.active().plan, record)
            run.tell_step()
            run.arguments.listeners.epoch(record)
        write_run_files(run)

    def _learn(self, record: EpochRecord) -> None:
        """Take in what steps took, for the plans to come."""
        run, inputs = self._run, self._run.inputs
        plan, workload = run.in_force.plan, inputs.workload
        if plan is None or inputs.profile is None or inputs.cluster is None:
            return
        each = run.config.accumulation_steps
        last = record.segments[-1]
        run.costs.learner.observe(
            last,
            self._role.active().plan,
            inputs.profile,
            inputs.cluster,
            run.costs.steps,
            last.optimizer_steps
            * (workload.batches_per_step(each) if workload else each),
        )
