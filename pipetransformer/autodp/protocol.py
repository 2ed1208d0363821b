"""The two-phase change of plans: PREPARE, then COMMIT or ABORT on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from pipetransformer import _C
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.plane import SLICE, ControlPlane


def announced_epoch(plane: ControlPlane) -> int:
    """Return the latest plan epoch that any rank has announced, -1: none.

    Raises:
        RuntimeError: the store holds what no rank writes.
    """
    with plane.guard():
        return _C.autodp.announced_epoch(plane.core, _prefix(plane))


def _prefix(plane: ControlPlane) -> str:
    """Return what this generation's keys start with.

    Ranks of another generation, that went on without this one or that it went on
    without, cannot meet it there.
    """
    return plane.own_key("") if plane.generation > 0 else ""


class PlanAgreement:
    """One rank's part in the change to the plan of epoch `epoch`.

    On every rank in this order: `receive` (the writer calls `announce` first),
    `meet`, prepare, `acknowledge`, `decide`. Exactly one decision is ever written
    per epoch, and all ranks read that one. The rules are those of the C++ state
    machine ``csrc/autodp/protocol/transition.h``.

    Args:
        plane: the control plane.
        epoch: plan epoch, above every epoch announced before.
        writer: whether this rank announces the plan; one rank does.
        participants: the world ranks that must acknowledge. The writer's count; the
            others learn them with the plan. A rank that is not among them receives
            plan and decision too.
        timeout: from here to the decision; the plane's protocol timeout by default.
    """

    def __init__(
        self,
        plane: ControlPlane,
        epoch: int,
        *,
        writer: bool,
        participants: Sequence[int],
        timeout: timedelta | None = None,
    ) -> None:
        self._plane = plane
        self._prefix = _prefix(plane)
        self._core = _C.autodp.PlanTransition(
            rank=plane.rank,
            world_size=plane.world_size,
            epoch=epoch,
            writer=writer,
            participants=list(participants),
            run=plane.info.run_id,
            parent=plane.plan_hash,
            timeout_s=(timeout or plane.config.protocol_timeout).total_seconds(),
        )
        self.epoch = epoch

    def announce(self, blob: bytes) -> None:
        """Publish the plan and move the head; the writer only.

        The epoch before is closed first: if nobody has decided it, by ABORT.

        Raises:
            RuntimeError: this epoch, or a later one, was announced before.
        """
        self._core.announce(blob)
        self._finish()
        error = self._core.announce_error()
        if error:
            raise RuntimeError(error)

    def receive(self, *, timeout: timedelta | None = None) -> bytes:
        """Wait for the plan; by default for as long as all ranks live.

        The deadline of `decide` counts from here.

        Raises:
            RuntimeError: the plan is of another run, or does not follow the plan
                that is in force here. The other ranks were told: they abort.
            PeerFailure: the run failed, the deadline passed, or the other ranks
                went on without this one (phase ``"fenced"``).
        """
        self._core.receive()
        if not self._drive(timeout):
            self._fail_deadline(timeout)
        self._check_fence()
        plan = self._core.plan()
        if plan is None:
            raise self._fenced("the plan was given up before it was written")
        mismatch = self._core.mismatch()
        if mismatch:
            self.acknowledge(mismatch)
            raise RuntimeError(mismatch)
        return plan

    def meet(self) -> bool:
        """Wait until every participant has received the plan.

        What needs all of them, such as connecting a group, is begun only then, and
        so never waits for a rank that does not come.

        Returns:
            False when a participant did not come by the deadline, when the decision
            is there already, and on a rank that is no participant. There is nothing
            to prepare then: go on with `decide`.
        """
        self._core.meet()
        self._finish()
        return self._core.met()

    def is_decided(self) -> bool:
        """Tell whether the decision is there already; asked while preparing.

        Before this rank has acknowledged it can only be ABORT: nothing is prepared.
        """
        with self._plane.guard():
            return self._core.is_decided(self._plane.core, self._prefix)

    def acknowledge(self, error: str | None = None, *, waited: bool = False) -> None:
        """Say that this rank is ready, or with `error` why it cannot be.

        Args:
            error: the reason, None when it is ready.
            waited: other ranks kept this one waiting until it gave up. It is then not
                among `refused`, and those that do not answer are `missing`.
        """
        refusal = "" if error is None else error or "error"
        self._core.acknowledge(refusal, waited=waited)
        self._finish()

    def decide(self, *, adopts: bool = True) -> bool:
        """Wait for the decision, and take part in making it.

        The writer commits once every participant has acknowledged. A refusal
        aborts, and so does anyone after the deadline.

        Args:
            adopts: `adopt` the plan of a COMMIT at once; else the caller does it when
                the plan takes effect here.

        Returns:
            True for COMMIT, False for ABORT (see `reason`), equal on all ranks.

        Raises:
            PeerFailure: the run failed; the decision then means nothing. Of phase
                ``"fenced"``: the other ranks went on without this one.
        """
        self._core.decide()
        self._finish()
        committed = bool(self._core.committed())
        if committed and adopts:
            self.adopt()
        return committed

    def adopt(self) -> None:
        """Put the committed plan in force on this rank: the next must follow it."""
        self._plane.plan_hash = self._core.hash()
        self._plane.set_epoch(self.epoch)

    @property
    def reason(self) -> str:
        """Why the decision is ABORT; empty before, and after COMMIT."""
        return self._core.reason()

    @property
    def missing(self) -> list[int]:
        """Ranks that kept the others waiting until the deadline; of an ABORT."""
        return self._core.missing()

    @property
    def refused(self) -> list[int]:
        """Ranks that said they cannot take part; of an ABORT."""
        return self._core.refused()

    @property
    def participants(self) -> list[int]:
        """Ranks that must acknowledge, as the plan says; empty before it is there."""
        return self._core.participants()

    def _finish(self) -> None:
        self._drive(None)
        self._check_fence()

    def _drive(self, timeout: timedelta | None) -> bool:
        """Step until done; False when `timeout` passed first."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        with self._plane.guard():
            while not self._core.drive(self._plane.core, self._prefix, SLICE):
                if end is not None and time.monotonic() >= end:
                    return False
        return True

    def _fail_deadline(self, timeout: timedelta | None) -> None:
        failure = _C.autodp.Failure(
            None,
            "receive",
            deadline_s=None if timeout is None else timeout.total_seconds(),
            reason=f"no rank published the plan of epoch {self.epoch}",
        )
        self._plane.core.fail(failure)
        self._plane.check()

    def _check_fence(self) -> None:
        if not self._core.fenced():
            return
        opened = self._core.plan() is not None
        if not opened or self._is_past():
            raise self._fenced("the other ranks have changed plans without this one")
        # A decision is there before its plan, and no rank removes it until the head is
        # past: the store does not keep what it was told, for nobody.
        failure = _C.autodp.Failure(
            None,
            "store",
            epoch=self.epoch,
            reason=f"decision/{self.epoch}: expected a key that stays, got none",
        )
        self._plane.core.fail(failure)
        self._plane.check()

    def _is_past(self) -> bool:
        with self._plane.guard():
            return self._core.is_past(self._plane.core, self._prefix)

    def _fenced(self, reason: str) -> PeerFailure:
        return PeerFailure(self._plane.rank, "fenced", epoch=self.epoch, reason=reason)
