"""The meeting at which all ranks of a run find each other.

Each rank says once that it has joined, and beats from then on. So a rank that dies
while the others still wait for a late one is missed like any other: by the rank that
has joined before it in the ring, which tells everybody who is there or comes later.
"""

from __future__ import annotations

import re
import threading
import time

from torch._C._distributed_c10d import Store

from pipetransformer.autodp import _binding
from pipetransformer.autodp.cards import Cards
from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.failure import PeerFailure

_POLL_S = 0.02
_RUN_ID = re.compile(r"[0-9a-f]{32}")
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
        self._successor: tuple[int, _binding.LivenessTracker] | None = None
        self._beats = 0
        self.looks = 0
        self.opened = False

    def attend(self, name: str, value: str, deadline: float) -> tuple[str, list[str]]:
        """Join, and wait until everybody has.

        Args:
            name: Of the run; that of rank 0 counts.
            value: What this rank tells the others.
            deadline: A ``time.monotonic()``.

        Returns:
            The run's name and all values, by rank.

        Raises:
            PeerFailure: a rank that had joined is gone, or this is another job's store.
            TimeoutError: ranks had not joined by the deadline.
            RuntimeError: the store holds what no rank writes.
        """
        self._beat()
        if self._rank == 0:
            self._store.set(f"{self._key}/id", name)
        self._store.set(f"{self._key}/{self._rank}", value)
        keys = [f"{self._key}/{rank}" for rank in self._ranks]
        next_beat = time.monotonic() + self._interval_s
        while True:
            self._check()  # also for who comes last, and would find all keys there
            if self._holds(f"{self._key}/id", *keys):
                break  # they go, and beat elsewhere: nobody is missed here any more
            self.opened = self.opened or self._holds(f"{self._key}/id")
            now = time.monotonic()
            if self._given_up.is_set():
                raise RuntimeError("meeting: expected somebody to wait for it")
            if now >= deadline:
                absent = [rank for rank in self._ranks if not self._holds(keys[rank])]
                hint = self._cards.hint(absent)
                raise TimeoutError(f"ranks {absent} did not join{hint}")
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
        run_id = self._read(f"{self._key}/id")
        if not _RUN_ID.fullmatch(run_id):
            raise RuntimeError(f"run id: expected 32 digits, got '{run_id[:80]}'")
        return run_id, [self._read(key) for key in keys]

    def _holds(self, *keys: str) -> bool:
        found: bool = self._store.check(list(keys))
        self.looks += 1
        return found

    def _read(self, key: str) -> str:
        """Return what a key holds that is there: `get` waits for no other."""
        return _binding.plain_text(bytes(self._store.get(key)))

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
            tracker = _binding.LivenessTracker(self._timeout_s, self._timeout_s, now)
            self._successor = follower, tracker
        counter = self._number(f"{self._key}/hb/{follower}")
        if not self._successor[1].observe(counter, now):
            self._store.compare_set(f"{self._key}/gone", "", str(follower))

    def _check(self) -> None:
        if self._holds(f"{self._key}/gone"):
            raise PeerFailure(
                self._number(f"{self._key}/gone"),
                "connect",
                deadline_s=self._timeout_s,
                reason="no heartbeat after it had joined",
            )
