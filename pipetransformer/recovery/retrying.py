"""Runs what ranks meet in, and goes on after the loss of one of them.

Under ``on_peer_failure="continue"`` a call that fails because a rank was lost is not
the end: the survivors take up a new plan (`resume.py`), and the call is made again,
or ends with the result that a survivor already has. So the user's script sees nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from pipetransformer.autodp import ControlPlane, PeerFailure
from pipetransformer.recovery.decision import END, FIRST, RankReport, Verdict, assess
from pipetransformer.recovery.lone_calls import LoneCalls
from pipetransformer.recovery.memory import agree_on_limit, give_way, giving_way
from pipetransformer.recovery.resume import Resumption
from pipetransformer.replica.role import Role
from pipetransformer.run.context import Run
from pipetransformer.run.control_log import ControlLog
from pipetransformer.transformation import records
from pipetransformer.transformation.attempts import Changes

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_WORK = ("evaluate", "predict")
"""Calls that last, and not for want of another rank."""

_MOST_IN_VAIN = 3
"""Failures of one operation, in a row, that no lost rank explains."""


class Attempt:
    """One attempt at an operation, as a ``with`` block.

    The failure of a peer ends the block and is kept; the frames that it passed through
    are not.

    Args:
        run: The run. Its plane knows what has failed, and its log counts the operation
            once the block has ended well.

    Attributes:
        result: What the operation gave, if every rank gets the same.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._plane: ControlPlane = run.plane
        self._log: ControlLog = run.control_log
        self._failure: PeerFailure | None = None
        self.result: object = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            self._log.complete(self.result)
            return False
        try:
            with self._plane.guard():
                give_way(self._run, error)
                raise error
        except PeerFailure as failure:
            self._failure = bare(failure)
            return True
        except BaseException as other:
            if other is not error:
                raise
            error.__traceback__ = trace  # as it was: none of these frames
            return False

    def failed(self) -> PeerFailure:
        """Return what ended the block."""
        if self._failure is None:
            raise RuntimeError("an operation was left open; please report")
        return self._failure


class RetriedCalls:
    """Makes the calls of one rank that need other ranks.

    Args:
        run: The run.
        role: This rank's place.
        changes: Takes a standby through messages and changes of plan.
        recovery: Puts a new plan in force after a loss.

    Attributes:
        recovered: The last `follow` ended because a recovery made this rank active.
        first: The script's position where this rank makes the first plan, while it
            does; see `begin`.
        lone: Finds out where ranks are in different calls.
    """

    def __init__(
        self,
        run: Run,
        role: Role,
        changes: Changes,
        recovery: Resumption,
    ) -> None:
        self._run = run
        self._role = role
        self._changes = changes
        self._recovery = recovery
        self.recovered = False
        self.first: int | None = None
        self.lone = LoneCalls(run.plane, run.control_log)
        self._vain = -1, 0  # an operation, and its failures without a lost rank

    @property
    def done(self) -> int:
        """How many operations this rank has completed."""
        return self._run.control_log.done

    def call(
        self,
        name: str,
        body: Callable[[], T],
    ) -> T | None:
        """Run one operation on an active rank; again after each loss of a rank.

        Args:
            name: The call that this is, as `report.assess` knows it.
            body: Meets the other active ranks; can be run again. Every rank gets the
                same result.

        Returns:
            What `body` gave here, or on the survivor that was ahead; None if this
            rank stands by from here on.

        Raises:
            PeerFailure: a rank was lost, and the others cannot go on.
        """
        for attempt in self.attempts(name):
            with attempt:
                result = body()
                attempt.result = result
                return result
        ahead: T | None = None if self._role.stands_by else self._run.control_log.result  # type: ignore[assignment]
        return ahead

    def attempts(self, name: str, position: int | None = None) -> Iterator[Attempt]:
        """Make one operation on an active rank; again after each loss of a rank.

        Run the operation in the ``with`` block of each attempt, and leave the loop
        there; where the loop ends by itself, this rank stands by from here on, or a
        survivor has completed the operation and `ControlLog.result` is its result.

        Args:
            name: The call that this is, as `decision.assess` knows it.
            position: The number of the batch in hand, in a training step.

        Raises:
            PeerFailure: a rank was lost, and the others cannot go on.
        """
        self._run.state.registered.settle()
        while True:
            attempt, began = Attempt(self._run), time.perf_counter()
            try:
                self._run.plane.check()
            except PeerFailure as error:
                failure = bare(error)
            else:
                self.lone.enter(name, position)
                try:
                    yield attempt
                finally:
                    self.lone.leave()
                failure = attempt.failed()
            since = None if name in _WORK else began
            if self._survive(failure, name, position, since) or self._role.stands_by:
                return

    def follow(self, *kinds: str, call: str) -> dict[str, Any] | None:
        """Wait on a standby rank for a message; see `Changes.follow`.

        Returns:
            The message; None if this rank is active from here on.
        """
        self.recovered = False
        while True:
            try:
                with self._run.guarded(), giving_way(self._run):
                    return self._changes.follow(*kinds)
            except PeerFailure as error:
                failure = bare(error)
            self._survive(failure, call, None)
            if not self._role.stands_by:
                self.recovered = True
                return None

    def begin(self, body: Callable[[], T]) -> T:
        """Make the first plan, on every rank; again after each loss of a rank.

        Args:
            body: Meets all other ranks; can be run again.

        Raises:
            PeerFailure: a rank was lost, and the others cannot go on.
        """
        self.first = self._run.control_log.position
        while True:
            try:
                with self._run.guarded(), giving_way(self._run):
                    result = body()
                self.first = None
                return result
            except PeerFailure as error:
                failure = bare(error)
            self._survive(failure, FIRST, None)

    def finish(self) -> None:
        """Meet all other ranks at the end; without those that are lost on the way."""
        while True:
            try:
                with self._run.guarded():
                    self._run.plane.finish()
                return
            except PeerFailure as error:
                failure = bare(error)
            self._survive(failure, END, None)

    def _survive(
        self,
        failure: PeerFailure,
        call: str,
        position: int | None,
        began: float | None = None,
    ) -> bool:
        """Go on without the lost ranks; True if the operation is done elsewhere.

        Args:
            failure: What ended the call.
            call: Its name.
            position: The number of the batch in hand, in a training step.
            began: When the call that has failed did, where it is a short one; None:
                the time until the failure was found is no loss of this rank.
        """
        run, plane = self._run, self._run.plane
        if not plane.survives or plane.failure is None:
            raise failure
        now = time.perf_counter()
        with run.clock.phase("recovery"):
            return self._go_on(failure, call, position, began or now)

    def _go_on(
        self, failure: PeerFailure, call: str, position: int | None, began: float
    ) -> bool:
        run, plane = self._run, self._run.plane
        active, shape = self._role.replica is not None, self._changes.shape()
        start, done, before = time.perf_counter(), self.done, set(plane.members)
        self._recovery.rest()
        for _ in range(run.info.world_size + 1):
            mine = self._standing(call, position, active)
            members = set(plane.members)
            answers, called = plane.survive(mine.to_bytes()), time.perf_counter()
            reports = {r: RankReport.from_bytes(b) for r, b in answers.items()}
            verdict = self._assess(reports, members)
            done_there = reports[verdict.source].done
            all_live = members == set(answers)
            smaller = any(report.drops_copies for report in reports.values())
            if self._is_vain(done_there, all_live, smaller):
                raise failure
            agree_on_limit(run, reports)
            try:
                with plane.guard(), giving_way(run):
                    phases = self._recovery.go_on(verdict, reports)
            except PeerFailure as error:
                failure = bare(error)
                if plane.failure is None:
                    raise failure from None
                if not active and self._role.replica is not None:
                    # It became active, and another rank was lost right then.
                    active, call, position = True, *self._joined_at(call)
                continue
            lost = sorted(before - set(reports))
            seconds, after = time.perf_counter() - began, self._changes.shape()
            phases = {"notice": start - began, "roll_call": called - start, **phases}
            self.lone.begin_anew()
            records.record_loss(run, shape, after, lost, seconds, phases)
            return self._catch_up(reports[verdict.source], done, active)
        raise failure

    def _is_vain(self, done: int, all_live: bool, smaller: bool) -> bool:
        """Tell, identically on every rank, whether to stop trying the next operation.

        A failure that comes back although every rank lives, and none has become
        smaller, is none that a smaller run is free of.
        """
        operation, times = self._vain
        if smaller or not all_live:
            self._vain = done, 0
        else:
            self._vain = done, times + 1 if operation == done else 1
        return self._vain[1] > _MOST_IN_VAIN

    def _joined_at(self, call: str) -> tuple[str, int | None]:
        """Return the call, as active ranks name it, that this rank has joined."""
        joined = self._changes.joined
        if call == "pass":
            return "step", joined.position if joined is not None else None
        return call, None

    def _assess(self, reports: Mapping[int, RankReport], members: set[int]) -> Verdict:
        """Conclude how to go on; `members`: of the generation that has failed."""
        run = self._run
        try:
            return assess(reports)
        except ValueError as error:
            lost = sorted(members - set(reports))
            raise PeerFailure(
                lost[0] if len(lost) == 1 else None,
                "recovery",
                epoch=run.in_force.plan_epoch,
                reason=f"ranks {lost} lost; {error}",
            ) from None

    def _catch_up(self, ahead: RankReport, done: int, active: bool) -> bool:
        """Take over the count; True if `ahead` completed what this rank was in."""
        log = self._run.control_log
        completed = active and done < ahead.done
        if completed and self._role.replica is not None:
            self._run.state.registered.hold()
        log.catch_up(ahead.done, ahead.result if completed else log.result)
        return completed

    def _standing(self, call: str, position: int | None, active: bool) -> RankReport:
        run = self._run
        open_pass = self._recovery.open_pass
        segment, counts = open_pass.report()
        return RankReport(
            done=run.control_log.done,
            result=run.control_log.result,
            step=run.state.step,
            holds=run.state.holds,
            decided=run.state.decided_epoch,
            active=active,
            call=call,
            script=run.control_log.position,
            first=self.first,
            position=position,
            plan_epoch=run.in_force.plan_epoch,
            plan_hash=run.plan_hash,
            segment=segment,
            counts=counts,
            due_at=self._recovery.open_pass.due_at,
            memory_limit=run.memory_limit,
            drops_copies=run.drops_copies,
        )


def bare(failure: PeerFailure) -> PeerFailure:
    """Return the failure without the frames that it passed through.

    They hold the pipeline of the plan that was in force, and a reducer must not
    outlive its group.
    """
    return PeerFailure(
        failure.rank,
        failure.phase,
        epoch=failure.epoch,
        deadline_s=failure.deadline_s,
        reason=failure.reason,
    )
