"""Puts a plan of the survivors in force after ranks were lost.

It is an ordinary change of plan, by the ordinary protocol, except for two things: the
group and the pipelines of the old plan are gone when it begins, and the state comes
from the rank that is ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.recovery.decision import RankReport, Verdict
from pipetransformer.replica.role import Role
from pipetransformer.run.context import Run
from pipetransformer.state.state import Integrity
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.background import Ahead
from pipetransformer.transformation.phases import withdraw
from pipetransformer.transformation.rank_layout import propose_again


class Resumption:
    """One rank's part in it.

    Args:
        run: The run.
        role: This rank's place.
        changes: Takes this rank through the change of plan.
        open_pass: The pass that is being counted.
        ahead: What is being prepared, void after a loss.
    """

    def __init__(
        self,
        run: Run,
        role: Role,
        changes: Changes,
        open_pass: OpenPass,
        ahead: Ahead,
    ) -> None:
        self._run = run
        self._role = role
        self._changes = changes
        self.open_pass = open_pass
        self._ahead = ahead

    def rest(self) -> None:
        """End what was under way; undo what a step that broke off has changed.

        That is buffers and gradients.
        """
        self._ahead.give_up()
        run, replica = self._run, self._role.replica
        if replica is None:
            return
        replica.workers.drain()  # cells of the old pass may still be running
        before = run.step_buffers.before_step() or {}
        named = dict(run.arguments.model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, value in before.items():
                named[name].copy_(value)
        run.arguments.model.zero_grad(set_to_none=True)

    def go_on(
        self, verdict: Verdict, reports: Mapping[int, RankReport]
    ) -> dict[str, float]:
        """Take this rank into the survivors' plan; every survivor calls this.

        Returns:
            Seconds per phase.

        Raises:
            PeerFailure: another rank was lost meanwhile, or the survivors' plan was
                refused.
        """
        run = self._run
        ahead, source = reports[verdict.source], verdict.source
        if verdict.at_end:
            self._publish(verdict)
            return {}
        if verdict.begins:
            self._begin_again(verdict, reports)
            return {}
        plan_epoch = max(s.plan_epoch for s in reports.values()) + 1
        run.follow_plan(ahead.plan_hash)
        proposal = None
        if run.info.rank == source:
            self.open_pass.abandon_segment(alike(ahead, reports))
            proposal = propose_again(
                run,
                plan_epoch,
                able=verdict.able,
                whole=verdict.whole,
                operations=ahead.done,
                position=ahead.position,
            )
        self._role.retire()
        outcome = self._changes.recover(plan_epoch, proposal, ahead.done, ahead.result)
        if not outcome.committed:
            # A rank was slow, or could not connect. Whoever is gone misses the roll.
            run.plane.fail("recovery", outcome.reason, rank=-1)
            run.plane.check()
        self._hand_over(source, ahead.due_at)
        if self._role.stands_by:
            run.control_log.step_back(ahead.script)
        self._publish(verdict)
        return outcome.phases

    def _begin_again(self, verdict: Verdict, reports: Mapping[int, RankReport]) -> None:
        """Go back to before the first plan, which the lead then makes anew.

        Some ranks may have had it in force already. Their state is that of rank 0 at
        best, which still has what it began with.
        """
        run, mine = self._run, reports[self._run.info.rank]
        self._role.retire()
        withdraw(run, max(s.plan_epoch for s in reports.values()))
        leads = run.info.rank == verdict.source
        run.state.become(Integrity.WHOLE if leads else Integrity.OLD)
        run.follow_plan(reports[verdict.source].plan_hash)
        if mine.first is not None:
            run.control_log.go_back(mine.first)
        self._publish(verdict)

    def _hand_over(self, source: int, due_at: int | None) -> None:
        """Give the pass so far from the rank that is ahead to all others."""
        replica = self._role.replica
        if replica is None:
            self.open_pass.drop()
            return
        self.open_pass.take_over(replica.group.members.index(source))
        # What was prepared is void, but when plans change next must be equal.
        self.open_pass.due_at = due_at

    def _publish(self, verdict: Verdict) -> None:
        """Publish what a lost lead may have left unsaid."""
        if self._run.info.rank == verdict.source:
            self._run.control_log.publish_again(verdict.script)


def alike(
    ahead: RankReport, reports: Mapping[int, RankReport]
) -> list[Mapping[str, Any]]:
    """Return the counts of the ranks that counted the same batches as `ahead`.

    A rank that was in the optimizer step which `ahead` has taken had counted its share.
    """
    wanted = ahead.counts.get("batches")
    of_segment = [
        report.counts
        for report in reports.values()
        if report.counts and report.segment == ahead.segment
    ]
    each = (c if c["batches"] == wanted else _with_due(c) for c in of_segment)
    return [counts for counts in each if counts["batches"] == wanted]


def _with_due(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {**counts, **{name: counts[name] + v for name, v in counts["due"].items()}}
