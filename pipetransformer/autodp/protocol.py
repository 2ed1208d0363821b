"""The two-phase change of plans: PREPARE, then COMMIT or ABORT on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from pipetransformer.autodp import _binding
from pipetransformer.autodp.plane import MessagePlane

_COMMIT = b"COMMIT"
_ABORT = b"ABORT"
_ACKNOWLEDGED = b"ok"
_KEPT_EPOCHS = 2


class Transition:
    """One rank's part in the change to the plan of epoch `epoch`.

    On every rank in this order: `receive` (the writer calls `announce` first),
    prepare, `acknowledge`, `decide`. Exactly one decision is ever written per
    epoch, and all ranks read that one.

    Args:
        plane: the message plane.
        epoch: plan epoch, above every epoch announced before.
        writer: whether this rank announces the plan; one rank does.
        participants: the world ranks that must acknowledge.
        timeout: from here to the decision; the plane's protocol timeout by default.
    """

    def __init__(
        self,
        plane: MessagePlane,
        epoch: int,
        *,
        writer: bool,
        participants: Sequence[int],
        timeout: timedelta | None = None,
    ) -> None:
        if epoch < 0:
            raise ValueError(f"epoch: expected a number from 0, got {epoch}")
        self._plane = plane
        self._writer = writer
        self._participants = list(participants)
        self._machine = _binding.DecisionMachine(writer, self._participants)
        self._timeout_s = (timeout or plane.config.protocol_timeout).total_seconds()
        self._end: float | None = None
        self.epoch = epoch
        self.reason = ""
        """Why the decision is ABORT; empty before, and after COMMIT."""

    def announce(self, blob: bytes) -> None:
        """Publish the plan and move the head; the writer only.

        Raises:
            RuntimeError: this epoch, or a later one, was announced before.
        """
        plane = self._plane
        head = plane.read("head")
        if head is not None and int(head) >= self.epoch:
            raise RuntimeError(
                f"plan epoch: expected one above the head {int(head)}, got {self.epoch}"
            )
        if self.epoch > _KEPT_EPOCHS:
            plane.delete(*self._keys(self.epoch - _KEPT_EPOCHS - 1))
        plane.publish(f"plan/{self.epoch}", blob)
        mine = str(self.epoch).encode()
        if plane.compare_set("head", head or b"", mine) != mine:
            raise RuntimeError(
                f"plan epoch {self.epoch}: expected one writer, got a second one"
            )

    def receive(self, *, timeout: timedelta | None = None) -> bytes:
        """Wait for the plan; by default for as long as all ranks live.

        The deadline of `decide` counts from here.
        """
        blob = self._plane.wait(f"plan/{self.epoch}", phase="receive", timeout=timeout)
        self._start_clock()
        return blob

    def acknowledge(self, error: str | None = None) -> None:
        """Say that this rank is ready, or with `error` why it cannot be."""
        self._start_clock()
        value = _ACKNOWLEDGED if error is None else error.encode() or b"error"
        self._plane.publish(f"ack/{self.epoch}/{self._plane.rank}", value)
        self._machine.on_acknowledge(self._plane.rank, error is None)
        if error is not None:
            self.reason = f"rank {self._plane.rank}: {error}"

    def decide(self) -> bool:
        """Wait for the decision, and take part in making it.

        The writer commits once every participant has acknowledged. A refusal
        aborts at once, and so does anyone after the deadline.

        Returns:
            True for COMMIT, False for ABORT (see `reason`), equal on all ranks.

        Raises:
            PeerFailure: the run failed; the decision then means nothing.
        """
        end = self._start_clock()
        while True:
            proposal = self._machine.proposal()
            if proposal is not None:
                return self._propose(proposal)
            left_s = end - time.monotonic()
            if left_s <= 0:
                self._on_deadline()
                continue
            self._await_news(timedelta(seconds=left_s))
            outcome = self._machine.outcome()
            if outcome is not None:
                return self._settle(outcome)

    def _start_clock(self) -> float:
        if self._end is None:
            # Non-writers are patient for longer: the writer knows the reason.
            share = 1.0 if self._writer else 1.25
            self._end = time.monotonic() + share * self._timeout_s
        return self._end

    def _await_news(self, timeout: timedelta) -> None:
        groups = [[f"decision/{self.epoch}"]]
        if self._writer:
            groups.append([self._ack_key(rank) for rank in self._machine.missing()])
        found = self._plane.wait_any(groups, timeout=timeout)
        if found == 0:
            self._read_decision(self._plane.read(groups[0][0]))
        elif found == 1:
            self._read_acknowledgements()

    def _read_decision(self, value: bytes | None) -> None:
        if value is not None:
            self._machine.on_decision(value == _COMMIT)
            if value != _COMMIT:
                self.reason = value[len(_ABORT) :].decode(errors="replace").strip()

    def _read_acknowledgements(self) -> None:
        for rank in self._machine.missing():
            value = self._plane.read(self._ack_key(rank))
            if value is not None:
                self._machine.on_acknowledge(rank, value == _ACKNOWLEDGED)
                if value != _ACKNOWLEDGED and not self.reason:
                    self.reason = f"rank {rank}: {value.decode(errors='replace')}"

    def _on_deadline(self) -> None:
        self._read_acknowledgements()
        self._machine.on_deadline()
        if not self.reason:
            self.reason = (
                f"ranks {self._machine.missing()} did not acknowledge within "
                f"{self._timeout_s:.1f} s"
            )

    def _propose(self, commit: bool) -> bool:
        desired = _COMMIT if commit else _ABORT + b" " + self.reason.encode()
        key = f"decision/{self.epoch}"
        self._read_decision(self._plane.compare_set(key, b"", desired))
        outcome = self._machine.outcome()
        if outcome is None:
            raise RuntimeError("decision: expected an outcome; please report")
        return self._settle(outcome)

    def _settle(self, commit: bool) -> bool:
        if commit:
            self.reason = ""
            self._plane.set_epoch(self.epoch)
        return commit

    def _ack_key(self, rank: int) -> str:
        return f"ack/{self.epoch}/{rank}"

    def _keys(self, epoch: int) -> list[str]:
        acks = [f"ack/{epoch}/{rank}" for rank in range(self._plane.world_size)]
        return [f"plan/{epoch}", f"decision/{epoch}", *acks]
