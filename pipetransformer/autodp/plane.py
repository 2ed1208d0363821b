"""The message plane: keys and waits that all ranks of a run share."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import distributed_c10d as c10d

from pipetransformer.autodp import rollcall
from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.launch import LaunchInfo
from pipetransformer.autodp.life import PlaneLife
from pipetransformer.autodp.signals import termination

logger = logging.getLogger(__name__)

SLICE = timedelta(milliseconds=100)
"""Waits return to Python this often, so that signals are handled."""


class MessagePlane(PlaneLife):
    """What all ranks, active and standby, talk over.

    C++ threads of each rank watch the others; none of them needs the GIL. As soon
    as one rank fails, every wait of every rank raises `PeerFailure`, and so do the
    collectives of active groups. Methods may be called from several threads.

    Its base class tells whether the run lives, and on whom: see `PlaneLife`.

    Args:
        store: this run's keys, from `connect`.
        info: this process's place, from `connect`.
        config: deadlines.
    """

    def __init__(
        self, store: c10d.Store, info: LaunchInfo, config: AutoDPConfig | None = None
    ) -> None:
        super().__init__(store, info, config or AutoDPConfig())
        self.store = store
        self.plan_hash: str | None = ""
        """Names the plan in force, set by `Transition`; plans that do not follow it are
        refused. None on a rank that has missed a change and holds no state."""
        self._closed = False

    @property
    def num_store_operations(self) -> int:
        """Operations on the store so far, each look of a wait included.

        Those of a change of plan, of a group that connects and of a roll call are among
        them; beats, which have a connection of their own, are not.
        """
        return self.core.num_store_operations()

    def publish(self, key: str, value: bytes) -> None:
        """Write `value` under `key`; others may be waiting for it."""
        with self.guard():
            self.core.set(key, value)

    def read(self, key: str) -> bytes | None:
        """Return what `key` holds now, None if it was never written."""
        with self.guard():
            return self.core.read(key)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write `desired` if `key` holds `expected` (empty: is not there).

        Returns:
            What the key holds afterwards.
        """
        with self.guard():
            return self.core.compare_set(key, expected, desired)

    def delete(self, *keys: str) -> None:
        """Remove `keys`; absent ones are ignored."""
        with self.guard():
            self.core.remove(list(keys))

    def delete_later(self, *keys: str) -> None:
        """Remove `keys` in the background; does nothing after the end of the run."""
        self.core.remove_later(list(keys))

    def wait(self, key: str, *, phase: str, timeout: timedelta | None = None) -> bytes:
        """Wait until some rank has published `key`, and return its value.

        Args:
            key: the key.
            phase: what is going on, for the failure's text.
            timeout: deadline; None waits for as long as all ranks live.

        Raises:
            PeerFailure: the run failed, or the deadline passed (which fails it).
        """
        if self.wait_any([[key]], timeout=timeout) is None:
            self._fail_deadline(phase, f"no rank published '{key}'", timeout)
        value = self.read(key)
        if value is None:
            raise RuntimeError(
                f"{key}: expected a key that stays, got a deleted one; please report"
            )
        return value

    def wait_any(
        self, groups: Sequence[Sequence[str]], *, timeout: timedelta | None = None
    ) -> int | None:
        """Wait until all keys of one group exist.

        Args:
            groups: lists of keys; the first complete one wins.
            timeout: None waits for as long as all ranks live.

        Returns:
            The index of the complete group, None when the timeout passed.

        Raises:
            PeerFailure: the run failed.
        """
        keys = [list(group) for group in groups]
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            part = SLICE
            if end is not None:
                part = min(part, timedelta(seconds=max(0.0, end - time.monotonic())))
            with self.guard():
                found = self.core.wait_any(keys, part)
            if found >= 0:
                return found
            if end is not None and time.monotonic() >= end:
                return None

    def gather(self, key: str, value: bytes, *, phase: str) -> list[bytes]:
        """Exchange one value per member; all call this with the same key.

        A key can be gathered once per generation. Waits for as long as all members
        live.

        Returns:
            The values in the order of `members`.
        """
        own = self.own_key("gather")
        self.publish(f"{own}/{key}/{self.rank}", value)
        return [self.wait(f"{own}/{key}/{rank}", phase=phase) for rank in self.members]

    def _fail_deadline(
        self, phase: str, reason: str, timeout: timedelta | None
    ) -> None:
        deadline_s = None if timeout is None else timeout.total_seconds()
        failure = PeerFailure(None, phase, deadline_s=deadline_s, reason=reason)
        self.core.fail(failure.to_tuple())
        self.check()

    def survive(self, standing: bytes) -> dict[int, bytes]:
        """Go on with the ranks that are left, in the next generation.

        To be called by the main thread on every survivor after a `PeerFailure`;
        each waits for the others' calls. Keys that were published stay; groups of
        the failed generation do not come back to life, and want `retire`. Afterwards
        waits work again; a second failure, also one during the call, needs a second
        call.

        Args:
            standing: what the other survivors need to know of this rank.

        Returns:
            The standings of the new generation's members, by world rank, equal on
            all of them.

        Raises:
            PeerFailure: this rank cannot go on: the policy is ``"raise"``, it failed
                itself (own error, a signal), the store is lost, or the others went on
                without it (phase ``"fenced"``).
            RuntimeError: this generation has not failed.
        """
        return rollcall.survive(self, standing)

    def finish(self, *, timeout: timedelta | None = None) -> None:
        """Meet all members and leave together; the store's server leaves last.

        A rank that goes on without the store just leaves.

        Args:
            timeout: deadline of the meeting; None waits while all members live.

        Raises:
            PeerFailure: a rank failed before it came here.
        """
        if self._closed:
            return
        try:
            if not self.store_lost:
                self._meet_and_leave(timeout)
        except PeerFailure:
            if self.failure is not None:
                raise
            logger.debug("the store was lost at the end")
        self.close()

    def _meet_and_leave(self, timeout: timedelta | None) -> None:
        finish, left = self.own_key("finish"), self.own_key("left")
        self.publish(f"{finish}/{self.rank}", b"1")
        everyone = [f"{finish}/{rank}" for rank in self.members]
        if self.wait_any([everyone], timeout=timeout) is None:
            self._fail_deadline("finish", "not every rank came to the end", timeout)
        self.core.stop_watching()
        if self.rank != self.info.store_rank:
            # Nothing waits for this one: the server may be gone a moment later.
            with contextlib.suppress(PeerFailure):
                self.publish(f"{left}/{self.rank}", b"1")
            return
        others = [f"{left}/{rank}" for rank in self.members if rank != self.rank]
        limit = self.config.protocol_timeout
        if others and self.wait_any([others], timeout=limit) is None:
            logger.warning("not every rank said goodbye within %s", limit)

    def close(self) -> None:
        """End this rank's threads without a meeting; idempotent.

        After a failure this first tells the others. A rank that closes without
        failure or `finish` looks dead to its peers.
        """
        if not self._closed:
            self._closed = True
            self.core.close()
            self.tell_refused()

    def termination(self) -> contextlib.AbstractContextManager[None]:
        """Turn SIGTERM and SIGHUP into `PeerFailure` while the body runs."""
        return termination(self.core)
