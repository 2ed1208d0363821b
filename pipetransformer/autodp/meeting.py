"""The meeting at which all ranks of a run find each other.

Each rank says once that it has joined, and beats from then on. So a rank that dies
while the others still wait for a late one is missed like any other: by the rank that
has joined before it in the ring, which tells everybody who is there or comes later.

The run is named after what all of them drew for it. So a run whose ranks share a secret
with an earlier one cannot be led into that one's keys by its old messages, whose seals
still fit: a rank goes on only under a name that its own draw is part of.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
import time
import uuid

from torch._C._distributed_c10d import Store

from pipetransformer import _C
from pipetransformer.autodp.cards import Cards
from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.failure import PeerFailure

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_SAID = re.compile(r"([0-9a-f]{32}) (.*)")
_LONGEST_QUOTE = 80  # letters
_NUMBER = re.compile(r"\d{1,18}")


class Meeting:
    """One rank's part in it.

    Args:
        store: All ranks' keys; for this thread alone.
        key: What the meeting's keys start with; no two meetings share it.
        rank: This rank.
        world_size: How many are to come.
        config: Heartbeats.
        given_up: Set once nobody waits for this rank's part any more.
        cards: Who is on the store.

    Attributes:
        looks: How often the store has answered, for whoever watches this thread.
        opened: The rank that opens the meeting has joined: from then on the store
            serves this run, and its loss is that of a rank.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        rank: int,
        world_size: int,
        config: AutoDPConfig,
        given_up: threading.Event,
        cards: Cards,
    ) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._ranks = range(world_size)
        self._followers = [*range(rank + 1, world_size), *range(rank)]
        self._interval_s = config.heartbeat_interval.total_seconds()
        self._timeout_s = config.heartbeat_timeout.total_seconds()
        self._given_up = given_up
        self._cards = cards
        self._successor: tuple[int, _C.autodp.LivenessTracker] | None = None
        self._highest: int | None = None  # beat of the successor
        self._beats = 0
        self.looks = 0
        self.opened = False

    def attend(
        self, value: str, deadline: float, *, told_by: float = math.inf
    ) -> tuple[str, list[str]]:
        """Join, and wait until everybody has.

        Args:
            value: What this rank tells the others, in one line.
            deadline: A ``time.monotonic()``.
            told_by: When the log tells who is missing, an earlier one.

        Returns:
            The run's name, 32 hexadecimal digits that no other run has, and all
            values, by rank.

        Raises:
            PeerFailure: a rank that had joined is gone, or this is another job's store.
            TimeoutError: ranks had not joined by the deadline.
            RuntimeError: the store holds what no rank writes, or not what this rank
                wrote.
        """
        self._beat()
        said = f"{uuid.uuid4().hex} {value}"
        keys = [f"{self._key}/{rank}" for rank in self._ranks]
        self._store.set(keys[self._rank], said)
        next_beat = time.monotonic() + self._interval_s
        while True:
            self._check()  # also for who comes last, and would find all keys there
            if self._holds(*keys):
                break  # they go, and beat elsewhere: nobody is missed here any more
            self.opened = self.opened or self._holds(keys[0])
            now = time.monotonic()
            if self._given_up.is_set():
                raise RuntimeError("meeting: expected somebody to wait for it")
            if now >= min(told_by, deadline):
                absent = [rank for rank in self._ranks if not self._holds(keys[rank])]
                hint = self._cards.hint(absent)
                if now >= deadline:
                    raise TimeoutError(f"ranks {absent} did not join{hint}")
                logger.warning(
                    "ranks %s have not joined yet%s; waiting for %.0f s more",
                    absent,
                    hint,
                    deadline - now,
                )
                told_by = deadline
            if now >= next_beat:
                next_beat = now + self._interval_s
                self._beat()
                if refusal := self._cards.refusal():
                    raise PeerFailure(None, "connect", reason=refusal)
                for follower in self._followers:
                    if self._holds(keys[follower]):
                        self._miss(follower)
                        break
            time.sleep(_POLL_S)
        self.opened = True
        return self._named(said, [self._read(key) for key in keys])

    def _named(self, said: str, told: list[str]) -> tuple[str, list[str]]:
        """Return the run's name and the values, from what all ranks have said."""
        if told[self._rank] != said:
            raise RuntimeError(
                "meeting: expected what this rank has said, got "
                f"'{told[self._rank][:_LONGEST_QUOTE]}'"
            )
        drawn, values = [], []
        for text in told:
            found = _SAID.fullmatch(text)
            if found is None:
                raise RuntimeError(
                    "meeting: expected 32 digits and an address, got "
                    f"'{text[:_LONGEST_QUOTE]}'"
                )
            drawn.append(found[1])
            values.append(found[2])
        return hashlib.sha256(" ".join(drawn).encode()).hexdigest()[:32], values

    def _holds(self, *keys: str) -> bool:
        found: bool = self._store.check(list(keys))
        self.looks += 1
        return found

    def _read(self, key: str) -> str:
        """Return what a key holds that is there: `get` waits for no other."""
        return _C.core.plain_text(bytes(self._store.get(key)))

    def _number(self, key: str) -> int | None:
        """Return the number that a key holds, None if it holds something else."""
        text = self._read(key)
        return int(text) if _NUMBER.fullmatch(text) else None

    def _beat(self) -> None:
        self._store.set(f"{self._key}/hb/{self._rank}", str(self._beats))
        self._beats += 1

    def _miss(self, follower: int) -> None:
        """Tell everybody if the next rank that has joined beats no more."""
        now = time.monotonic()
        if self._successor is None or self._successor[0] != follower:
            tracker = _C.autodp.LivenessTracker(self._timeout_s, self._timeout_s, now)
            self._successor = follower, tracker
            self._highest = None
        # Beats only rise: an old one that is put back is no sign of life.
        counter = self._number(f"{self._key}/hb/{follower}")
        if self._highest is None or (counter or 0) > self._highest:
            self._highest = counter
        if not self._successor[1].observe(self._highest, now):
            self._store.compare_set(f"{self._key}/gone", "", str(follower))

    def _check(self) -> None:
        if self._holds(f"{self._key}/gone"):
            raise PeerFailure(
                self._number(f"{self._key}/gone"),
                "connect",
                deadline_s=self._timeout_s,
                reason="no heartbeat after it had joined",
            )
