"""Takes one rank through the script: epochs, passes, evaluations, transformations."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipetransformer import checkpoint, evaluation
from pipetransformer.autodp import PeerFailure
from pipetransformer.data import ElasticSampler
from pipetransformer.layout import ranks_of_plan
from pipetransformer.planning import agree_on_profile, decide, make_plan
from pipetransformer.proposal import Proposal
from pipetransformer.report.console import epoch_line, transformation_line
from pipetransformer.report.history import PlanShape, TransformationRecord
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
        self._pass: Pass | None = None

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
        with run.guarded():
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
            proposal = self._propose() if self.has_plan else None
            plan_epoch = proposal.plan_epoch if proposal is not None else None
            self._tell("epoch", epoch=run.state.epoch, plan_epoch=plan_epoch)
            if proposal is not None:
                self._take_part(proposal.plan_epoch, proposal, start)
            return run.state.epoch

    def first_plan(self, workload: Workload) -> None:
        """Profile on the lead and put the first plan in force, on all ranks."""
        run = self.run
        run.workload = workload
        with run.guarded():
            agree_on_profile(run, lead=self.is_lead)
            start = time.perf_counter()
            proposal = self._propose() if self.is_lead else None
            self._take_part(run.plan_epoch + 1, proposal, start)
        if not self.has_plan:
            raise PeerFailure(
                None,
                "PREPARE",
                epoch=run.plan_epoch,
                reason="a rank refused the first plan",
            )

    def begin_pass(
        self, num_samples: int, batch_size: int, drop_last: bool
    ) -> ElasticSampler | None:
        """Return the sampler of this replica; on a standby wait for the pass's end."""
        run = self.run
        if self._stands_by:
            with run.guarded():
                run.script.follow("pass_end")
            return None
        layout = run.layout
        if layout is None:
            raise RuntimeError("pass without a plan; please report")
        share, index = layout.node_share(run.info.rank)
        sampler = ElasticSampler(
            num_samples,
            batch_size,
            seed=run.config.seed,
            num_nodes=run.info.num_nodes,
            node=run.info.node,
            replicas_on_node=share,
            replica_on_node=index,
            drop_last=drop_last,
        )
        sampler.set_epoch(run.state.epoch)
        sampler.set_position(run.state.batch)
        run.freezer.train(True)
        self._pass = Pass(run, self._shape(self.active()))
        run.current_pass = self._pass
        return sampler

    def finish_pass(self) -> None:
        """Reduce and record the pass that was left open, if any.

        It is called by the next engine call and not by the loop itself: a loop that
        ends in an exception must not meet its peers in a collective.
        """
        run, counted = self.run, self._pass
        if counted is None:
            return
        self._pass = run.current_pass = None
        with run.guarded():
            record = counted.close(run, self.active())
            run.history.epochs.append(record)
            self._tell("pass_end")
        if self.is_lead:
            _LOG.info("%s", epoch_line(record))

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, evaluation.Metric],
        name: str,
        collate: Callable[[list[Any]], Any] | None,
    ) -> dict[str, float]:
        """Evaluate on the active ranks; a standby waits for the result."""
        run = self.run
        result: dict[str, float]
        with run.guarded():
            if self._stands_by:
                result = run.script.follow("evaluate")["metrics"]
            else:
                result = evaluation.evaluate(
                    run, self.active(), dataset, metrics, name=name, collate=collate
                )
                self._tell("evaluate", metrics=result)
        run.metrics = dict(result)
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

    def _propose(self) -> Proposal | None:
        """Decide and plan on every active rank; None when nothing changes."""
        run = self.run
        decision = decide(run)
        current = self.replica.plan if self.replica is not None else None
        plan = make_plan(run, decision.boundary, current)
        if self.replica is not None:
            self._compare_plans(plan.plan_hash)
        same = current is not None and (
            plan.boundary == current.boundary
            and plan.cuts == current.cuts
            and plan.num_microbatches == current.num_microbatches
            and plan.num_replicas == current.num_replicas
        )
        if same:
            return None
        return Proposal(
            plan_epoch=run.plan_epoch + 1,
            parent=current.plan_hash if current is not None else 0,
            plan=plan,
            layout=ranks_of_plan(plan, run.info),
            progress=run.state.progress(),
            policy=run.policy.state_dict(),
            frozen_units=decision.units,
            seed=run.config.seed,
            reason="; ".join([decision.reason, *plan.reasons[:1]]),
        )

    def _compare_plans(self, plan_hash: int) -> None:
        mine = f"{plan_hash:016x}"
        hashes = [
            part.decode()
            for part in self.active().group.all_gather_bytes(mine.encode())
        ]
        if len(set(hashes)) != 1:
            raise RuntimeError(
                f"plan hashes: expected the same on every active rank, got {hashes}; "
                "nothing was changed"
            )

    def _take_part(
        self, plan_epoch: int, proposal: Proposal | None, start: float
    ) -> None:
        """Go through one transformation and record it."""
        run = self.run
        before = self._shape(self.replica) if self.replica is not None else None
        writer = self.is_lead
        outcome = perform(run, self.replica, plan_epoch, proposal if writer else None)
        self.replica = outcome.replica
        if not outcome.committed:
            if writer:
                _LOG.warning(
                    "plan epoch %d was aborted; the old plan goes on", plan_epoch
                )
            return
        if writer:
            run.script.trim()
            self._record(outcome, before, time.perf_counter() - start)

    def _record(
        self, outcome: Outcome, before: PlanShape | None, seconds: float
    ) -> None:
        record = TransformationRecord(
            epoch=self.run.state.epoch,
            before=before,
            after=self._shape(self.active()),
            pause_seconds=seconds,
            phases=outcome.phases,
            reason=outcome.proposal.reason,
        )
        self.run.history.add(record)
        _LOG.info("%s", transformation_line(record))

    def _shape(self, replica: Replica) -> PlanShape:
        plan = replica.plan
        return PlanShape(
            num_frozen_layers=self.run.state.frozen_units,
            boundary=plan.boundary,
            num_stages=plan.num_stages,
            num_replicas=plan.num_replicas,
            num_microbatches=plan.num_microbatches,
        )

    # -- checkpoints -----------------------------------------------------------

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the training state."""
        run = self.run
        return {
            "policy": run.policy.state_dict(),
            "seed": run.config.seed,
            "run_id": run.info.run_id,
            "plan": self.replica.plan.to_json() if self.replica is not None else None,
            "profile": run.profile.to_json() if run.profile is not None else None,
        }

    def restore(self, path: str | os.PathLike[str], content: dict[str, Any]) -> None:
        """Load a checkpoint's weights now, its optimizer state with the first plan."""
        run = self.run
        checkpoint.check_model(content, run.state, path)
        if not self.is_lead:
            return  # takes everything over from the lead with the first plan
        checkpoint.load_model(content, run.state)
        run.policy.load_state_dict(content["extra"]["policy"])
        run.loaded = content
