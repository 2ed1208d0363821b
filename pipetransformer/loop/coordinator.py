"""Takes one rank through the script: epochs, passes, evaluations, transformations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipetransformer.autodp import PeerFailure
from pipetransformer.autodp.told import read_json
from pipetransformer.checkpoint import content as persistence
from pipetransformer.checkpoint.autosave import AutoSave
from pipetransformer.data import Batch
from pipetransformer.loop import evaluation
from pipetransformer.loop import step as training
from pipetransformer.loop.accumulation import Accumulated, Window, window_of
from pipetransformer.loop.epoch import PassLoop
from pipetransformer.loop.microbatches import FixedSet
from pipetransformer.loop.prediction import Prediction
from pipetransformer.loop.step_boundaries import StepBoundaries
from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.progress.sharding import Loading
from pipetransformer.recovery.memory import giving_way
from pipetransformer.recovery.resume import Resumption
from pipetransformer.recovery.retrying import RetriedCalls
from pipetransformer.replica.replica import Replica
from pipetransformer.replica.role import Role
from pipetransformer.report import profiled
from pipetransformer.run.arguments import Workload
from pipetransformer.run.context import Run
from pipetransformer.state.state import Integrity
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.background import Ahead
from pipetransformer.transformation.freeze_decision import take_decision
from pipetransformer.transformation.measured_inputs import agree_on_profile
from pipetransformer.transformation.phases import Outcome

T = TypeVar("T")


class Coordinator:
    """Every engine call at which ranks meet, in the order of the user's script.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.autosave = AutoSave(run)
        self._role = role = Role(run)
        self._changes = changes = Changes(run, role)
        self._open_pass = open_pass = OpenPass(run, role, changes)
        shares = run.config.accumulation_steps > 1
        self._accumulated = Accumulated() if shares else None
        self._ahead = ahead = Ahead(run, role, changes)
        recovery = Resumption(run, role, changes, open_pass, ahead)
        self._calls = RetriedCalls(run, role, changes, recovery)
        boundaries = StepBoundaries(run, role, changes, ahead, self._calls, open_pass)
        self._passes = PassLoop(
            run, role, boundaries, self._calls, open_pass, self.autosave
        )

    @property
    def is_lead(self) -> bool:
        """True on the rank that writes messages, plans and files."""
        return self._role.is_lead

    @property
    def has_plan(self) -> bool:
        """True once a plan has been committed."""
        return self.run.in_force.layout is not None

    @property
    def replica(self) -> Replica | None:
        """What this rank drives; None on a standby."""
        return self._role.replica

    def require_plan(self, call: str) -> None:
        """Refuse a call that needs a plan, on every rank alike: nobody waits."""
        if not self.has_plan:
            raise ValueError(
                f"{call}: expected a plan, got none before the first pass; "
                "engine.prepare(dataset, batch_size) makes one, also where a resumed "
                "run had finished, so that no pass follows"
            )

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
        run.inputs.workload = workload
        run.state.num_batches = workload.num_batches
        if self.is_lead:
            persistence.check_resumed_pass(run)
            persistence.check_registered(run)
            run.state.become(Integrity.WHOLE)  # all others begin with this rank's
        reason = self._calls.begin(self._plan_first)
        run.control_log.complete(reason)
        if not self._role.stands_by:
            run.control_log.tell("ready", lead=self.is_lead, reason=reason)
        run.began_at = run.state.step, run.state.decided_epoch
        self._calls.lone.watch()
        if not self.has_plan:
            raise PeerFailure(
                None,
                "PREPARE",
                epoch=run.in_force.plan_epoch,
                reason=f"the first plan was refused: {reason}",
            )

    def _plan_first(self) -> str:
        """Return why there is no plan; empty if there is one."""
        run = self.run
        if not self.has_plan:  # else a recovery has put one in force
            with run.clock.phase("profile"):
                agree_on_profile(run, lead=self.is_lead)
            # The protocol's deadline begins when every rank has come here.
            self._meet_before_plan()
        with run.clock.phase("transformation"):
            if self._role.stands_by:
                message = self._changes.follow("ready", "plan")
                return "" if message is None else str(message["reason"])
            if self.has_plan:
                return ""
            outcome = self._change_plan()
            refused = outcome is not None and not outcome.committed
            return outcome.reason if outcome is not None and refused else ""

    def _meet_before_plan(self) -> None:
        """Wait for all ranks; compare what they have registered, and their batches.

        Raises:
            ValueError: other names, or another set or batch size, on another rank; on
                every rank.
        """
        run, workload = self.run, self.run.inputs.workload
        batches = workload.describe() if workload is not None else {}
        mine = {"register": run.state.registered.names, "batches": batches}
        texts = run.plane.gather(
            "first plan", json.dumps(mine).encode(), phase="before the first plan"
        )
        told = [read_json(text, "what ranks begin with") for text in texts]
        for rank, theirs in zip(run.plane.members, told, strict=True):
            for what in mine:
                if theirs[what] != told[0][what]:
                    run.plane.finish()  # every rank refuses: leave together
                    raise ValueError(
                        f"{what}: expected {json.dumps(told[0][what])} on every rank, "
                        f"as on rank {run.plane.members[0]}, got "
                        f"{json.dumps(theirs[what])} on rank {rank}"
                    )

    def register(self, name: str, registered: object) -> None:
        """Take an object whose state goes with the training state.

        Raises:
            ValueError: a call after the first plan, or a name that is taken.
            TypeError: an object whose state cannot travel.
        """
        if self.has_plan:
            raise ValueError(
                f"register({name!r}): expected a call before the first plan, which the "
                "first pass and engine.prepare make, got a later"
            )
        self.run.state.registered.add(name, registered)

    def begin_epoch(self, count: int) -> int | None:
        """Pass an epoch boundary; transform the run if the plan changes.

        Returns:
            The epoch that begins, or None when all are done.
        """
        run, state = self.run, self.run.state
        with run.clock.phase("transformation"):
            while True:
                joined = False
                if self._role.stands_by:
                    message = self._calls.follow(
                        "epoch", "finish", "plan", call="epoch"
                    )
                    if message is not None:
                        epoch = message.get("epoch")  # none where the run finishes
                        if epoch is None:
                            return None
                        state.epoch = int(epoch)
                        return state.epoch
                    joined = not self._calls.recovered
                if state.epoch >= count:
                    if not self.has_plan:
                        persistence.restore_registered(run)
                    run.control_log.tell("epoch", lead=self.is_lead, epoch=None)
                    return None
                within = run.config.prepare_steps > 0  # passes alone change plans
                if not self.has_plan or within or self._enter_epoch(joined) is not None:
                    if self._role.stands_by:
                        # It has left. The others may have to change the plan again.
                        continue
                    run.control_log.tell("epoch", lead=self.is_lead, epoch=state.epoch)
                    return state.epoch

    def _enter_epoch(self, joined: bool) -> bool | None:
        """Change the plan if it is to change; `joined`: it just has, by messages.

        Returns:
            Whether it changed; None if this rank stands by since a rank was lost.
        """
        changed = [self._changes.joined] if joined else []

        def body() -> bool:
            proposal = changed.pop() if changed else None
            if proposal is None and self._changes.are_possible():
                outcome = self._change_plan()
                if outcome is not None and outcome.committed:
                    proposal = outcome.proposal
            if proposal is not None:
                self._open_pass.hand_records(proposal)
            return proposal is not None

        return self._calls.call("epoch", body)

    def _change_plan(self) -> Outcome | None:
        start = time.perf_counter()
        proposal = self._changes.propose(None)
        return self._changes.carry_out(proposal, start) if proposal else None

    def end_epoch(self, epoch: int) -> None:
        """Close the epoch: decide about the next one, then save."""
        self.finish_pass()
        run = self.run
        run.state.begin_epoch(epoch + 1)
        if self.replica is not None and run.config.scheduler_interval == "epoch":
            run.state.schedule_epoch()
        if self.replica is not None:
            with run.clock.phase("pass"):
                take_decision(run)
        if self.is_lead:
            self.autosave.after_epoch(self.replica)

    # -- passes ----------------------------------------------------------------

    def batches(self, loading: Loading) -> Iterator[Batch]:
        """Yield this replica's part of each batch, then record the pass."""
        if self._accumulated is not None:
            self._accumulated.end()  # what the pass before has left within a step
        yield from self._passes.iterate(loading)
        if not self.run.state.awaits_steps:  # else the next call does
            self.finish_pass()

    def finish_pass(self) -> None:
        """Reduce and record the pass that was left open, if any."""
        self._passes.finish()

    def step(self, batch: Batch | Any, targets: Any = None) -> Tensor:
        """Take one training step; see `training.step`.

        When a rank is lost the step is taken again with the survivors' shares of the
        batch, or was taken by one of them: then the loss is that of the old share.
        """
        run, opened = self.run, self._open_pass
        self.active()  # refuses a standby
        run.state.registered.settle()
        with profiled("step"):
            if not isinstance(batch, Batch):
                if self._accumulated is not None:
                    raise ValueError(
                        "Config.accumulation_steps: expected batches of "
                        "engine.batches, got bare inputs"
                    )
                with run.guarded():
                    counted, share = opened.counted, self._passes.in_hand
                    return training.step(
                        run, self.active(), counted, batch, targets, share=share
                    )
            run.turn_to(batch.index)
            if self._accumulated is not None:
                window = self._window(batch)
                self._accumulated.follow(window, batch.index, self._passes.first)
                if not window.ends_with(batch.index):
                    return self._accumulate(batch, window, self._accumulated)
            for attempt in self._calls.attempts("step", batch.index):
                with attempt:
                    # No name for the replica: it must not outlive the attempt.
                    now, counted = self._passes.current(batch), opened.counted
                    so_far = self._accumulated
                    if so_far is not None:
                        self._begin_window(batch, self._window(batch), so_far)
                    return training.step(
                        run, self.active(), counted, now, targets, so_far
                    )
        return self._last_loss()  # a survivor took the step

    def _window(self, batch: Batch) -> Window:
        """Return the batches that share an optimizer step with `batch`."""
        workload = self.run.inputs.workload
        if workload is None:
            raise RuntimeError("batch of no plan; please report")
        return window_of(
            batch.index,
            done=self.run.state.batch,
            steps=self.run.config.accumulation_steps,
            workload=workload,
        )

    def _begin_window(self, batch: Batch, window: Window, so_far: Accumulated) -> None:
        """Let the gradients hold the batches of the window before `batch`.

        They do, unless a rank was lost meanwhile: then its share of them is, too.
        """
        run, plan_epoch = self.run, self.run.in_force.plan_epoch
        missing = so_far.missing(window, plan_epoch, batch.index)
        training.begin_window(run, so_far, window, plan_epoch)
        for number in missing:
            again = self._open_pass.load(number)
            counted = self._open_pass.counted
            training.accumulate(run, self.active(), counted, again, so_far)

    def _accumulate(self, batch: Batch, window: Window, so_far: Accumulated) -> Tensor:
        """Take a batch whose step comes with a later one.

        No operation of its own: a loss of ranks is survived in that of the step, which
        takes the batch again.
        """
        run = self.run
        try:
            with run.plane.guard(), giving_way(run):
                self._begin_window(batch, window, so_far)
                counted = self._open_pass.counted
                return training.accumulate(
                    run, self.active(), counted, self._passes.current(batch), so_far
                )
        except PeerFailure:
            if not run.plane.survives:
                raise
            return self._last_loss()

    def _last_loss(self) -> Tensor:
        last = self.run.last_loss
        return torch.tensor(0.0 if last is None else last.value)

    def loss(self, batch: Batch) -> Tensor:
        """Run the model and the loss; see `training.forward_loss`."""
        self.run.state.registered.settle()
        counted = self._open_pass.counted
        self.run.turn_to(batch.index, for_gradients=False)
        with self.run.guarded():
            return training.forward_loss(self.run, self.active(), counted, batch)

    def backward(self, loss: Tensor) -> None:
        """Run backward of a loss of the last batch; see `training.backward`."""
        replica = self.active()
        self.run.state.registered.settle()
        last = replica.active_model.last
        batch, rows = last.batch, last.rows
        run, counted = self.run, self._open_pass.counted
        if batch is not None:
            run.turn_to(batch.index)
        value = run.own_loss = training.step_loss(run, replica, loss)
        self._calls.lone.enter("backward", None if batch is None else batch.index)
        try:
            with run.guarded():
                training.backward(
                    run,
                    replica,
                    counted,
                    loss,
                    value,
                    batch,
                    rows,
                    share=self._passes.in_hand,
                )
        finally:
            self._calls.lone.leave()

    def update(self) -> None:
        """Take the step of a loop of the user's own; see `training.update`."""
        with self.run.guarded():
            training.update(self.run, self.active())

    def evaluate(
        self,
        samples: FixedSet,
        metrics: Mapping[str, evaluation.Metric],
    ) -> dict[str, float]:
        """Evaluate on the active ranks; a standby waits for the result.

        In the middle of a pass only the active ranks come here, and the result is
        theirs alone.
        """
        self.require_plan("evaluate")
        run, name, within = self.run, samples.name, self._passes.is_within
        run.state.note_set(name)
        run.tell_step()
        if not within:
            self.finish_pass()

        def body() -> dict[str, float]:
            if within:
                self._open_pass.settle_buffers()
            result = evaluation.evaluate(run, self.active(), samples, metrics)
            # Within the operation: a rank that was behind gets it with the state.
            run.state.note_evaluation(result, name)
            return result

        with run.clock.phase("evaluate"):
            result = self._evaluate_within(body) if within else self._evaluate(body)
        if not within:
            self._note(result, name)
        return result

    def _note(self, result: Mapping[str, float], name: str) -> None:
        """Add an evaluation to the record of the pass before it, if this rank has one.

        A rank that stands by, or stood by in that pass, may have older ones alone.
        """
        epoch, records = self.run.state.epoch, self.run.history.epochs
        oldest = epoch if self._role.stands_by else epoch - 1
        sets, told = self.run.state.sets, self.run.state.told(result, name)
        if records and records[-1].epoch >= oldest:
            metrics = records[-1].metrics
            by_set = tuple(f"{each}/" for each in sets)
            if name != sets[0] and not any(m.startswith(by_set) for m in metrics):
                # Of the first set, evaluated when there was no other one.
                told = {**{f"{sets[0]}/{m}": v for m, v in metrics.items()}, **told}
            metrics.update(told)
        if self.is_lead:
            done = self._run_epoch_before()
            self.run.arguments.listeners.evaluation(done, told)

    def _run_epoch_before(self) -> int:
        """Return the last epoch whose pass has ended; -1 before the first.

        A resumed run has no record of it yet.
        """
        records = self.run.history.epochs
        return records[-1].epoch if records else self.run.state.epoch - 1

    def _evaluate(self, body: Callable[[], dict[str, float]]) -> dict[str, float]:
        while True:
            if self._role.stands_by:
                message = self._calls.follow("evaluate", call="evaluate")
                if message is not None:
                    metrics: dict[str, float] = message["metrics"]
                    return metrics
            result = self._calls.call("evaluate", body)
            if result is not None:
                self.run.control_log.tell("evaluate", lead=self.is_lead, metrics=result)
                return result

    def predict(self, prediction: Prediction) -> Any:
        """Predict on the active ranks; a standby waits until it is done.

        Returns:
            The result on ranks that get it; None on all others.
        """
        self.require_plan("predict")
        within = self._passes.is_within
        if not within:
            self.finish_pass()

        def body() -> bool:
            if within:
                self._open_pass.settle_buffers()
            return prediction.advance(self.run, self.active())

        with self.run.clock.phase("evaluate"):
            if within:
                while not self._evaluate_within(body):
                    pass
            else:
                self._predict(body)
        return None if self._role.stands_by else prediction.result

    def _predict(self, body: Callable[[], bool]) -> None:
        while True:
            stands_by = self._role.stands_by
            if stands_by and self._calls.follow("predict", call="predict"):
                return
            if self._calls.call("predict", body):
                self.run.control_log.tell("predict", lead=self.is_lead)
                return

    def _evaluate_within(self, body: Callable[[], T]) -> T:
        self.active()
        result = self._calls.call("within", body)
        if result is None:
            raise PeerFailure(
                None,
                "recovery",
                epoch=self.run.in_force.plan_epoch,
                reason="the survivors' plan has no place for this rank, which was "
                "evaluating within a pass",
            )
        return result

    # -- the end ---------------------------------------------------------------

    def finish(self) -> None:
        """Tell the standby ranks that the script has ended, and meet all others."""
        self.finish_pass()
        if not self._role.stands_by:
            self.run.control_log.tell("finish", lead=self.is_lead)
            if self.replica is not None:
                # Without a store nothing else tells that no rank is still busy. One
                # may be for long, as with the last evaluation of a script of its own;
                # with a store heartbeats tell that it lives.
                limit = None if self.run.plane.store_lost else timedelta(days=30)
                self._calls.call("leave", lambda: self._leave(limit))
        self.close()  # takes the group apart while the plane is open
        self._calls.finish()

    def _leave(self, limit: timedelta | None) -> None:
        """Save what no file has yet, and meet the other active ranks."""
        if self.is_lead:
            self.autosave.at_end(self.replica)
        self.active().group.barrier(timeout=limit)

    def close(self) -> None:
        """Drop the replica; safe after a failure."""
        self._calls.lone.close()
        self._ahead.give_up()
        self._role.retire()
