"""The control plane: keys and waits that all ranks of a run share, and its life."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from pipetransformer import _C
from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.launch import LaunchInfo, RunStore
from pipetransformer.autodp.rendezvous import meet_survivors
from pipetransformer.autodp.signals import termination

logger = logging.getLogger(__name__)

SLICE = timedelta(milliseconds=100)
"""Waits return to Python this often, so that signals are handled."""


class ControlPlane:
    """What all ranks, active and standby, talk over.

    C++ threads of each rank watch the others; none of them needs the GIL. As soon
    as one rank fails, every wait of every rank raises `PeerFailure`, and so do the
    collectives of active groups. Methods may be called from several threads.

    Under ``on_peer_failure="continue"`` a plane lives in **generations**: a failure
    ends one, and a rendezvous brings the ranks that are left into the next. Under
    ``"raise"`` there is one generation, and its failure ends the run.

    Args:
        store: this run's keys, from `connect`.
        info: this process's place, from `connect`.
        config: deadlines and failure policy.
    """

    def __init__(
        self, store: c10d.Store, info: LaunchInfo, config: AutoDPConfig | None = None
    ) -> None:
        config = config or AutoDPConfig()
        self.store = store
        self.info = info
        self.config = config
        self.core = _C.autodp.ControlPlane(
            *_connections(store),
            rank=info.rank,
            world_size=info.world_size,
            store_rank=-1 if info.store_rank is None else info.store_rank,
            heartbeat_interval_s=config.heartbeat_interval.total_seconds(),
            heartbeat_timeout_s=config.heartbeat_timeout.total_seconds(),
            group_timeout_s=config.store_timeout.total_seconds(),
            survives=self.survives,
        )
        self.plan_hash: str | None = ""
        """Names the plan in force, set by `PlanAgreement`; plans that do not follow it
        are refused. None on a rank that has missed a change and holds no state."""
        self._closed = False
        self._loss_told = False
        self._seal = store.seal if isinstance(store, RunStore) else None
        self._refusal_told = False

    @property
    def survives(self) -> bool:
        """Whether a generation may follow one that failed; always where one is alone.

        A lone process loses nobody: only a failure of its own that it can mend makes
        it go on.
        """
        alone = self.info.world_size == 1
        return alone or self.config.on_peer_failure == "continue"

    @property
    def rank(self) -> int:
        """Index of this process in the run."""
        return self.info.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the run."""
        return self.info.world_size

    @property
    def generation(self) -> int:
        """How many failures this rank has survived."""
        return self.core.generation()

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of this generation, ascending; all ranks at first."""
        return tuple(self.core.members())

    def set_epoch(self, epoch: int) -> None:
        """Name the plan epoch that failures are reported with from now on."""
        self.core.set_epoch(epoch)

    def own_key(self, name: str) -> str:
        """Return the key for `name` that no other generation uses."""
        return self.core.own_key(name)

    @property
    def failure(self) -> PeerFailure | None:
        """The failure that ended this generation, None while it is alive."""
        failure = self.core.failure()
        return None if failure is None else PeerFailure.of(failure)

    def check(self) -> None:
        """Raise the failure of this generation, if there is one.

        Raises:
            PeerFailure: the generation has failed.
        """
        self.core.check()
        _ = self.store_lost  # says so once
        self.tell_refused()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn whatever the body raises after a failure into that failure.

        Wrap code that waits for peers without going through this class, such as
        ``loss.backward()``: autograd turns our error into a plain RuntimeError.
        """
        try:
            yield
        except PeerFailure:
            raise
        except Exception:
            # Raised from C++: a frame that kept the failure would be kept by it, and
            # with it the collective that broke off and its connections.
            self.core.check()
            raise

    def fail(self, phase: str, reason: str, *, rank: int | None = None) -> None:
        """End this generation on all ranks; its first failure stays.

        A rank that names itself cannot go on; others may (see `survive`).

        Args:
            phase: what was going on here.
            reason: one sentence for people.
            rank: the rank held responsible, by default this one.
        """
        responsible = self.rank if rank is None else rank
        self.core.fail(_C.autodp.Failure(responsible, phase, reason=reason))

    @property
    def store_lost(self) -> bool:
        """Whether the store is gone, and this rank goes on without it or has failed."""
        loss = self.core.store_loss()
        if loss is not None and not self._loss_told:
            self._loss_told = True
            if self.failure is None:
                logger.warning(
                    "rank %d goes on without the store, so without further changes of "
                    "plan: %s",
                    self.rank,
                    loss,
                )
        return loss is not None

    def outlive_store(self, outlives: bool, members: Sequence[int] = ()) -> None:
        """Say whether this rank can go on when the store is lost.

        An active rank can: its group needs no store. `store_lost` then becomes True,
        operations on keys raise `PeerFailure` of phase ``"store"`` without ending
        the generation, and any error of a collective ends it at once. Without that,
        and at first, losing the store is a failure. Only ``"continue"`` heeds it.

        Args:
            outlives: whether it can.
            members: the active group. If one of them serves the store, the store's
                silence is that member's, and a failure after all.
        """
        served_within = self.info.store_rank in members
        self.core.outlive_store(outlives and not served_within)

    @property
    def num_refused(self) -> int:
        """Messages that no rank of this run wrote; ignored. 0 without a secret."""
        return 0 if self._seal is None else self._seal.refusals()[0]

    def tell_refused(self) -> None:
        """Warn once if messages were ignored that no rank of this run wrote."""
        if self._seal is None or self._refusal_told or self.num_refused == 0:
            return
        self._refusal_told = True
        count, key = self._seal.refusals()
        logger.warning(
            "rank %d ignores what others write into its run's store: %d messages "
            "without the run's seal so far, the first at '%s'; see Trust in "
            "docs/protocol.md",
            self.rank,
            count,
            key,
        )

    @property
    def num_store_operations(self) -> int:
        """Operations on the store so far, each look of a wait included.

        Those of a change of plan, of a group that connects and of a rendezvous count,
        too; beats, which have a connection of their own, do not.
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
        failure = _C.autodp.Failure(None, phase, deadline_s=deadline_s, reason=reason)
        self.core.fail(failure)
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
        failure = self.core.failure()
        if failure is None:
            raise RuntimeError(
                f"survive: expected a failed generation, got generation "
                f"{self.generation} alive"
            )
        if not self.survives:
            raise PeerFailure.of(failure)
        self._check_own_end()
        if self.store_lost:
            raise PeerFailure.of(failure)
        board = meet_survivors(self.core, standing, self.config)
        if board.fenced:
            # This rank ends: it must not answer a later one either.
            self.fail("fenced", "the other ranks went on without this one")
            self._check_own_end()
        standings = board.standings
        self.core.advance(sorted(standings))
        logger.warning(
            "rank %d goes on in generation %d with ranks %s after: %s",
            self.rank,
            self.generation,
            sorted(standings),
            failure,
        )
        self._check_own_end()  # SIGTERM during the rendezvous
        return standings

    def _check_own_end(self) -> None:
        """Raise the failure that ends this rank itself, whatever else has failed."""
        ended = self.core.ended()
        if ended is not None:
            raise PeerFailure.of(ended)

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


def _connections(store: c10d.Store) -> tuple[c10d.Store, c10d.Store]:
    """Return two connections to `store` for the threads of a plane."""
    if isinstance(store, RunStore):
        return store.connections
    other: Any = store  # clone() misses in its stub
    return other.clone(), other.clone()
