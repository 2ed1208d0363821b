"""Ends a run whose ranks wait for each other in different calls, before a deadline.

All active ranks run the same script, so the same operation is the same call on each of
them. Where one leaves a pass alone, or leaves out a batch, it waits for the others in
the next call, and they wait for it in a step. No collective tells that before its
deadline. So a rank whose operation takes some seconds says in the store which one it
is, or looks what another has said. In operations that are quicker nobody does anything.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from pipetransformer.autodp import ControlPlane
from pipetransformer.core.wire import printable
from pipetransformer.run.control_log import ControlLog

_LOG = logging.getLogger(__name__)

_EVERY_S = 2.0
"""How often a rank looks whether it is in the operation that it was in before."""

_UNTOLD = ("step", "backward")
"""Calls that are not told in the store: there are many, and another is told."""

_NAMES = {
    "step": "a training step",
    "backward": "a training step",
    "close": "the end of a pass",
    "boundary": "a change of plan",
    "epoch": "a change of plan",
    "within": "an evaluation within a pass",
    "leave": "the end of the run",
}
"""Calls as people know them."""


class Place(NamedTuple):
    """Which operation a rank is in.

    Attributes:
        done: How many operations the rank has completed.
        attempt: How many it has begun since, this one included.
        call: Its name.
        batch: The number of its batch, in a training step.
    """

    done: int
    attempt: int
    call: str
    batch: int | None

    @property
    def key(self) -> str:
        """Where it is told; equal on all ranks that are as far."""
        return f"call/{self.done}/{self.attempt}"


class LoneCalls:
    """One rank's part: a thread that looks where the rank is.

    Args:
        plane: The control plane of all ranks.
        log: Counts the operations that this rank has completed.
    """

    def __init__(self, plane: ControlPlane, log: ControlLog) -> None:
        self._plane = plane
        self._log = log
        self._place: Place | None = None
        self._last = -1, 0  # operations done, and attempts since
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Begin to look, where there are other ranks; again: do nothing."""
        if self._thread is None and self._plane.world_size > 1:
            self._thread = threading.Thread(
                target=self._watch, name="pt-lone-calls", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread; it may still be in an operation on the store."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_EVERY_S)
            self._thread = None

    def enter(self, call: str, batch: int | None = None) -> None:
        """Note that an operation begins; on an active rank."""
        done, attempt = self._log.done, 1
        if done == self._last[0]:  # what has raised is no operation that is done
            attempt += self._last[1]
        self._last = done, attempt
        self._place = Place(done, attempt, call, batch)

    def leave(self) -> None:
        """Note that it is over, however it has ended."""
        self._place = None

    def begin_anew(self) -> None:
        """Count attempts as all survivors of a failure do."""
        self._last = -1, 0

    def _watch(self) -> None:
        before: Place | None = None
        told: set[str] = set()
        while not self._ended.wait(_EVERY_S):
            now = self._place
            try:
                if now is not before and told:
                    self._plane.delete_later(*told)
                    told = set()
                if now is not None and now is before:
                    told |= self._compare(now)
            except RuntimeError as failure:  # of a peer, or the store is closing
                _LOG.debug("not compared: %s", failure)
            before = now

    def _compare(self, mine: Place) -> set[str]:
        """Compare with what another rank has told, or tell it.

        Returns:
            The key that was written, if any.
        """
        plane, generation = self._plane, self._plane.generation
        key, own = plane.own_key(mine.key), f"{plane.rank} {mine.call}".encode()
        waits = mine.call in _UNTOLD
        held = plane.read(key) if waits else plane.compare_set(key, b"", own)
        rank, _, call = (held or own).decode(errors="replace").partition(" ")
        is_current = self._place is mine and plane.generation == generation
        if call != mine.call and is_current:
            plane.fail(
                "calls of the active ranks",
                "expected every rank to run the same script, got rank "
                f"{printable(rank, longest=9)} at {_name_of(call)} and rank "
                f"{plane.rank} at {_name_of(mine.call, mine.batch)}; take a step with "
                "the same batches of a pass on all of them, leave it at the same one, "
                "and call what ranks do together, such as evaluate, on all of them",
                rank=-1,
            )
        return {key} if held == own else set()


def _name_of(call: str, batch: int | None = None) -> str:
    name = printable(_NAMES.get(call, call), longest=60)
    return f"'{name}'" if batch is None else f"'{name} with batch {batch}'"
