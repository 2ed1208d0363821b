"""One log of a run: what the lead says of its script, and what was completed.

Every rank runs the same script. Each point at which ranks may part (the plan changes,
an epoch begins, a pass ends, an evaluation is done, the run ends) is one numbered
message: the lead writes it, a standby rank waits for it, the other active ranks only
remember it, because the collectives of the active group already keep them in step.

A training step, the end of a pass, an evaluation, a change of plan: each is one
operation, and each contains a collective of all active ranks. So two active ranks
never differ by more than one operation, and after a failure the number alone tells
who is ahead.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from pipetransformer.autodp import ControlPlane, PeerFailure
from pipetransformer.autodp.told import read_fields

_LOG = logging.getLogger(__name__)


_OF_CHANGES = ("plan", "switch")
"""Messages of a change of plan; the others need no answer of the standby ranks."""


class ControlLog:
    """Where this rank is: in the messages of the lead, and in operations.

    Args:
        plane: The control plane of all ranks.

    Attributes:
        position: The number of the next message.
        done: How many operations this rank has completed.
        result: What the last one gave, as plain values that survive JSON; None where
            each rank keeps its own.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._messages: dict[int, bytes] = {}
        self.position = 0
        self.done = 0
        self.result: object = None

    # -- operations ------------------------------------------------------------

    def complete(self, result: object) -> None:
        """Count one operation, which has changed nothing that is found on a second try.

        Args:
            result: What every rank gets from it; None where each keeps its own.
        """
        self.catch_up(self.done + 1, result)

    def catch_up(self, done: int, result: object) -> None:
        """Count as another rank does, which has completed so many operations."""
        self.done, self.result = done, result

    # -- messages --------------------------------------------------------------

    def _key(self, number: int) -> str:
        # A lost lead may have said something else here than the next one does.
        return self._plane.own_key(f"pos/{number}")

    def tell(self, kind: str, *, lead: bool, **content: Any) -> bool:
        """Pass the next position; called by every active rank, identically.

        Args:
            kind: What happens there.
            lead: Whether this rank publishes the message; the others remember it.
            content: Plain values, equal on every active rank.

        Returns:
            False if the message could not be published here.
        """
        message = json.dumps({"kind": kind, **content}).encode()
        number = self._remember(message)
        if not lead:
            return True
        try:
            self._plane.publish(self._key(number), message)
        except PeerFailure:
            # It is remembered: the ranks that survive publish it again. Whatever
            # comes next here raises the same failure.
            _LOG.debug("position %d was not published", number)
            return False
        return True

    def follow(self, *kinds: str) -> dict[str, Any]:
        """Wait for the next message; called by a standby rank.

        Args:
            kinds: What this rank's script may meet here; first the call it is at.

        Returns:
            The message; its kind is one of `kinds`.

        Raises:
            PeerFailure: a rank died, the store was lost or a peer gave up.
            RuntimeError: the lead's script is at another call than this rank's.
        """
        key = self._key(self.position)
        value = self._plane.wait(key, phase=f"waiting for {kinds[0]}", timeout=None)
        what = f"script position {self.position}"
        message = read_fields(value, what)
        kind = str(message.get("kind"))
        if kind not in kinds:
            raise RuntimeError(
                f"{what}: expected every rank to run the same script, got {kinds[0]!r} "
                f"here and {kind[:80]!r} on the lead; close an iterator that a loop "
                "has left early: what follows counts as part of its pass"
            )
        self._remember(value)
        return message

    def publish_again(self, first: int) -> None:
        """Publish what is remembered from position `first` on; for a new lead."""
        for number in sorted(n for n in self._messages if n >= first):
            self._plane.publish(self._key(number), self._messages[number])

    def step_back(self, position: int) -> None:
        """Forget a plan, or its beginning, that the survivors never came to.

        For a standby rank after a recovery. A lost lead's announcement may be the one
        message that is not said again: the survivors' own plan may do instead.

        Args:
            position: Of the rank that is ahead; its next message comes there.
        """
        if self.position != position + 1:
            return
        last = self._messages.get(position)
        if last is not None and json.loads(last)["kind"] in _OF_CHANGES:
            del self._messages[position]
            self.position = position

    def go_back(self, position: int) -> None:
        """Forget what came from `position` on: the ranks begin there again."""
        self._messages = {n: m for n, m in self._messages.items() if n < position}
        self.position = position

    def trim(self, *, lead: bool) -> None:
        """Forget messages that every rank has passed; called after COMMIT.

        A plan is committed only when every rank that takes part has acknowledged it,
        so none of them still waits for an earlier message. Call it only when every
        rank took part.

        Args:
            lead: Whether this rank deletes them from the store, too.
        """
        passed = [number for number in self._messages if number < self.position - 1]
        for number in passed:
            del self._messages[number]
            if lead:
                self._plane.delete_later(self._key(number))

    def _remember(self, message: bytes) -> int:
        number, self.position = self.position, self.position + 1
        self._messages[number] = message
        return number
