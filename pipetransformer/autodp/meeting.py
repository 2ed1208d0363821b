"""The meeting at which all ranks of a run find each other.

Rank 0 calls: it draws a name and leaves it at a place that all ranks know. The others
come to the newest call, and leave it for a newer one. So it does not matter how often
each of them was started before, and what those that are dead have left on the store.
A meeting ends once: rank 0 writes what all have said, or a rank writes who is gone. A
rank goes on only with what it has said itself in that: then all of them have met.

Each rank says once that it has joined, and beats from then on. So a rank that dies
while the others still wait for a late one is missed like any other: by the rank that
has joined before it in the ring, which tells everybody who is there or comes later. A
call may be one of dead ranks, left on a store that outlives them. So who comes to it
misses nobody until rank 0 has beaten once more, and who finds a meeting that has ended
gives rank 0 time for a newer call.

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
_DRAWN = re.compile(r"[0-9a-f]{32}")
_SAID = re.compile(r"([0-9a-f]{32}) (.*)")
_MET = "met"  # the first line of a meeting's end; what all have said follows
_GONE = re.compile(r"gone (\d{1,9})")  # or this is the only one
_LONGEST_QUOTE = 80  # letters
_NUMBER = re.compile(r"\d{1,18}")


class Meeting:
    """One rank's part in it.

    Args:
        store: All ranks' keys; for this thread alone.
        key: What the keys of all meetings of these ranks start with.
        rank: This rank.
        world_size: How many are to come.
        config: Heartbeats.
        given_up: Set once nobody waits for this rank's part any more.
        cards: Who is on the store.
        watched: A launcher ends all ranks when one dies, and may start them anew. So
            what the end of an earlier meeting says of a dead rank is old.

    Attributes:
        looks: How often the store has answered, for whoever watches this thread.
        opened: Rank 0 lives, and has called this meeting: from then on the store serves
            this run, and its loss is that of a rank.
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
        *,
        watched: bool = False,
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
        self._watched = watched
        self._drawn = uuid.uuid4().hex
        self._call: str | None = None  # the newest one that is known here
        self._joined = False  # it was not over when this rank came
        self._was_over = False  # there was one before this rank came
        self._believed: tuple[float, PeerFailure] | None = None  # from when on, if late
        self._first_beat: int | None = None  # of rank 0 that this rank has seen
        self._successor: tuple[str, _C.autodp.LivenessTracker] | None = None
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
        said = f"{self._drawn} {value}"
        if self._rank == 0:
            self._call_all(said)
        next_beat = time.monotonic() + self._interval_s
        while True:
            # Before the end is looked at: rank 0 ends a meeting before its next call.
            newest = None if self._rank == 0 else self._newest_call()
            if self._joined and (told := self._told()) is not None:
                self.opened = True
                return self._named(told)
            if self._rank == 0:
                self._end_if_all_are_here(said)
            elif newest is not None and newest != self._call:
                self._follow(newest, said)
            if self._given_up.is_set():
                raise RuntimeError("meeting: expected somebody to wait for it")
            now = time.monotonic()
            if self._believed is not None and now >= self._believed[0]:
                raise self._believed[1]
            if now >= min(told_by, deadline):
                self._tell_who_is_missing(deadline - now)
                told_by = deadline
            self._look_for_rank_0()
            if now >= next_beat:
                next_beat = now + self._interval_s
                if refusal := self._cards.refusal():
                    raise PeerFailure(None, "connect", reason=refusal)
                if self._joined:
                    self._beat()
                    self._miss()
            time.sleep(_POLL_S)

    # -- calling, joining and ending -------------------------------------------

    def _call_all(self, said: str) -> None:
        key = f"{self._key}/call"
        self._was_over = self._holds(key)
        self._join(self._drawn, said)
        self._store.set(key, self._drawn)
        self.opened = True

    def _newest_call(self) -> str | None:
        if not self._holds(f"{self._key}/call"):
            return None
        call = self._read(f"{self._key}/call")
        if _DRAWN.fullmatch(call) is None:
            raise RuntimeError(
                f"meeting: expected a call of 32 digits, got '{call[:_LONGEST_QUOTE]}'"
            )
        return call

    def _follow(self, call: str, said: str) -> None:
        """Go to another meeting, unless that was over before this rank came."""
        self._call, self._joined, self.opened = call, False, False
        self._first_beat = self._successor = self._believed = None
        self._was_over = self._holds(self._end_of(call))
        if not self._was_over:
            self._join(call, said)
            return
        try:
            self._told()
        except PeerFailure as failure:
            if not self._watched:
                self._believed = time.monotonic() + self._timeout_s, failure

    def _join(self, call: str, said: str) -> None:
        self._call, self._joined = call, True
        self._beat()
        self._store.set(self._place_of(self._rank), said)

    def _end_if_all_are_here(self, said: str) -> None:
        places = [self._place_of(rank) for rank in self._ranks]
        if not self._holds(*places):
            return
        told = [self._read(place) for place in places]
        if told[0] != said:
            raise RuntimeError(
                "meeting: expected what this rank has said, got "
                f"'{told[0][:_LONGEST_QUOTE]}'"
            )
        self._named(told)
        self._end("\n".join([_MET, *told]))

    def _end(self, how: str) -> None:
        """End the meeting so, unless it has ended: all ranks find the same end."""
        self._store.compare_set(self._end_of(self._call), "", how)

    def _told(self) -> list[str] | None:
        """Return what all ranks have said; None while this one waits for that."""
        key = self._end_of(self._call)
        if not self._holds(key):
            return None
        lines = bytes(self._store.get(key)).split(b"\n", len(self._ranks))
        first, *told = [_C.core.plain_text(line) for line in lines]
        if gone := _GONE.fullmatch(first):
            raise PeerFailure(
                int(gone[1]),
                "connect",
                deadline_s=self._timeout_s,
                reason="no heartbeat after it had joined",
            )
        if first != _MET or len(told) != len(self._ranks):
            raise RuntimeError(
                f"meeting: expected what {len(self._ranks)} ranks have said, got "
                f"'{first[:_LONGEST_QUOTE]}'"
            )
        if not told[self._rank].startswith(f"{self._drawn} "):
            # Another process had this rank's place when rank 0 ended the meeting.
            self._joined, self._was_over = False, True
            return None
        return told

    def _named(self, told: list[str]) -> tuple[str, list[str]]:
        """Return the run's name and the values, from what all ranks have said."""
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

    def _tell_who_is_missing(self, left_s: float) -> None:
        """Log it, or raise it if no time is left."""
        absent = [0]  # whoever else is there: without rank 0 it is another meeting
        if self.opened:
            places = {rank: self._place_of(rank) for rank in self._ranks}
            absent = [rank for rank, key in places.items() if not self._holds(key)]
        hint = self._cards.hint(absent) or self._hint()
        if left_s <= 0:
            raise TimeoutError(f"ranks {absent} did not join{hint}")
        logger.warning(
            "ranks %s have not joined yet%s; waiting for %.0f s more",
            absent,
            hint,
            left_s,
        )

    def _hint(self) -> str:
        if self._rank == 0 and self._newest_call() != self._call:
            return (
                "; another rank 0 has called the ranks since: give jobs that share a "
                "store a run_name each"
            )
        called_by_the_dead = self._call is not None and not self.opened
        if self._was_over or called_by_the_dead:
            return (
                "; ranks have met here before: if not in an earlier attempt of this "
                "job, another run is, or was, on this store; give jobs that share one "
                "a run_name each"
            )
        return ""

    # -- heartbeats ------------------------------------------------------------

    def _beat(self) -> None:
        self._store.set(self._beats_of(self._drawn), str(self._beats))
        self._beats += 1

    def _look_for_rank_0(self) -> None:
        """Find out that the call is not one of a dead rank 0: it beats once more."""
        if self.opened or not self._joined or self._call is None:
            return
        beat = self._number(self._beats_of(self._call))  # it calls by what it drew
        if self._first_beat is None:
            self._first_beat = beat
        elif beat is not None and beat > self._first_beat:
            self.opened = True

    def _miss(self) -> None:
        """Tell everybody if the next rank that has joined beats no more."""
        if not self.opened:
            return
        for follower in self._followers:
            if not self._holds(self._place_of(follower)):
                continue
            now, said = time.monotonic(), self._read(self._place_of(follower))
            # One that was started anew in its place begins with its beats.
            place = f"{follower} {said}"
            if self._successor is None or self._successor[0] != place:
                tracker = _C.autodp.LivenessTracker(
                    self._timeout_s, self._timeout_s, now
                )
                self._successor = place, tracker
                self._highest = None
            found = _SAID.fullmatch(said)
            beat = self._number(self._beats_of(found[1])) if found else None
            # Beats only rise: an old one that is put back is no sign of life.
            if self._highest is None or (beat or 0) > self._highest:
                self._highest = beat
            if not self._successor[1].observe(self._highest, now):
                self._end(f"gone {follower}")
            return

    # -- keys ------------------------------------------------------------------

    def _end_of(self, call: str | None) -> str:
        return f"{self._key}/{call}/end"

    def _place_of(self, rank: int) -> str:
        return f"{self._key}/{self._call}/{rank}"

    def _beats_of(self, drawn: str) -> str:
        return f"{self._key}/{self._call}/hb/{drawn}"

    def _holds(self, *keys: str) -> bool:
        found: bool = self._store.check(list(keys))
        self.looks += 1
        return found

    def _read(self, key: str) -> str:
        """Return what a key holds that is there: `get` waits for no other."""
        return _C.core.plain_text(bytes(self._store.get(key)))

    def _number(self, key: str) -> int | None:
        """Return the number that a key holds, None if it holds none."""
        if not self._holds(key):
            return None
        text = self._read(key)
        return int(text) if _NUMBER.fullmatch(text) else None
