"""The lead's place in the user's script, which the standby ranks follow.

Every rank runs the same script. Each engine call at which ranks may part (an epoch
begins, a pass ends, an evaluation is done, the run ends) is one numbered message:
the lead writes it, a standby rank waits for it, the other active ranks only count
it, because the collectives of the active group already keep them in step.
"""

from __future__ import annotations

import json
from typing import Any

from pipetransformer.autodp import MessagePlane


class ScriptLog:
    """A counter of script positions with one store message each.

    Args:
        plane: The message plane of all ranks.
    """

    def __init__(self, plane: MessagePlane) -> None:
        self._plane = plane
        self._count = 0
        self._trimmed = 0

    @staticmethod
    def _key(number: int) -> str:
        return f"pos/{number}"

    def lead(self, kind: str, **content: Any) -> None:
        """Write the next message; called by the lead only."""
        self._plane.publish(
            self._key(self._count), json.dumps({"kind": kind, **content}).encode()
        )
        self._count += 1

    def skip(self) -> None:
        """Count the next message without reading it; called by active ranks."""
        self._count += 1

    def follow(self, kind: str, *, or_finish: bool = False) -> dict[str, Any]:
        """Wait for the next message; called by a standby rank.

        Args:
            kind: The call that this rank's script is at.
            or_finish: Accept that the lead has left its loop and ended.

        Returns:
            The message. Its kind is `kind`, or "finish" where that is accepted.

        Raises:
            PeerFailure: a rank died, the store was lost or a peer gave up.
            RuntimeError: the lead's script is at another call than this rank's.
        """
        key = self._key(self._count)
        value = self._plane.wait(key, phase=f"waiting for {kind}", timeout=None)
        message: dict[str, Any] = json.loads(value)
        finished = or_finish and message["kind"] == "finish"
        if message["kind"] != kind and not finished:
            raise RuntimeError(
                f"script position {self._count}: expected every rank to run the same "
                f"script, got {kind!r} here and {message['kind']!r} on the lead"
            )
        self._count += 1
        return message

    def trim(self) -> None:
        """Delete messages that every rank has passed; called by the lead after COMMIT.

        A plan is committed only when every rank has acknowledged it, so no rank still
        waits for an earlier message.
        """
        for number in range(self._trimmed, self._count - 1):
            self._plane.delete(self._key(number))
        self._trimmed = max(self._trimmed, self._count - 1)
