"""The life of a message plane: its failure, its generations, and its store."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import distributed_c10d as c10d

from pipetransformer.autodp import _binding
from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.launch import LaunchInfo, RunStore

logger = logging.getLogger(__name__)


def _connections(store: c10d.Store) -> tuple[c10d.Store, c10d.Store]:
    """Return two connections to `store` for the threads of a plane."""
    if isinstance(store, RunStore):
        return store.connections
    other: Any = store  # clone() misses in its stub
    return other.clone(), other.clone()


class PlaneLife:
    """What a rank knows of its run: who is alive, what failed, is there a store.

    Under ``on_peer_failure="continue"`` a plane lives in **generations**: a failure
    ends one, and a roll call brings the ranks that are left into the next. Under
    ``"raise"`` there is one generation, and its failure ends the run.

    Args:
        store: this run's keys.
        info: this process's place.
        config: deadlines and failure policy.
    """

    def __init__(
        self, store: c10d.Store, info: LaunchInfo, config: AutoDPConfig
    ) -> None:
        self.info = info
        self.config = config
        self.core = _binding.MessagePlane(
            *_connections(store),
            rank=info.rank,
            world_size=info.world_size,
            store_rank=-1 if info.store_rank is None else info.store_rank,
            heartbeat_interval_s=config.heartbeat_interval.total_seconds(),
            heartbeat_timeout_s=config.heartbeat_timeout.total_seconds(),
            group_timeout_s=config.store_timeout.total_seconds(),
            survives=config.on_peer_failure == "continue",
        )
        self._loss_told = False
        self._seal = store.seal if isinstance(store, RunStore) else None
        self._refusal_told = False

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
        return _binding.plane_generation(self.core)[0]

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of this generation, ascending; all ranks at first."""
        return tuple(_binding.plane_generation(self.core)[1])

    @property
    def failure(self) -> PeerFailure | None:
        """The failure that ended this generation, None while it is alive."""
        failure = self.core.failure()
        return None if failure is None else PeerFailure.from_tuple(failure)

    @property
    def store_lost(self) -> bool:
        """Whether the store is gone, and this rank goes on without it or has failed."""
        loss = _binding.plane_store_loss(self.core)
        if loss is not None and not self._loss_told:
            self._loss_told = True
            if self.failure is None:
                logger.warning(
                    "rank %d goes on without the store, so without further changes of "
                    "plan: %s",
                    self.rank,
                    PeerFailure.from_tuple(loss),
                )
        return loss is not None

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

    def check(self) -> None:
        """Raise the failure of this generation, if there is one.

        Raises:
            PeerFailure: the generation has failed.
        """
        if self.core.failure() is not None:
            raise self._require_failure()
        _ = self.store_lost  # says so once
        self.tell_refused()

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
        _binding.plane_outlive_store(self.core, outlives and not served_within)

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
        except Exception as error:
            # No frame keeps the failure: they would keep each other alive, and with
            # them the collective that broke off and its connections.
            if self.core.failure() is not None:
                raise self._require_failure() from error
            if self._is_store_loss(error):
                raise self._require_loss() from error
            raise

    def _require_failure(self) -> PeerFailure:
        failure = self.core.failure()
        if failure is None:
            raise RuntimeError("failure: expected a latched one; please report")
        return PeerFailure.from_tuple(failure)

    def _require_loss(self) -> PeerFailure:
        loss = _binding.plane_store_loss(self.core)
        if loss is None:
            raise RuntimeError("store: expected a loss; please report")
        return PeerFailure.from_tuple(loss)

    def _is_store_loss(self, error: Exception) -> bool:
        """Tell whether `error` is C++'s account of the loss of the store."""
        loss = _binding.plane_store_loss(self.core)
        return loss is not None and str(error).startswith("peer failure:")

    def set_epoch(self, epoch: int) -> None:
        """Name the plan epoch that failures are reported with from now on."""
        self.core.set_epoch(epoch)

    def own_key(self, name: str) -> str:
        """Return the key for `name` that no other generation uses."""
        return f"gen/{self.generation}/{name}"

    def fail(self, phase: str, reason: str, *, rank: int | None = None) -> None:
        """End this generation on all ranks; its first failure stays.

        A rank that names itself cannot go on; others may (see `MessagePlane.survive`).

        Args:
            phase: what was going on here.
            reason: one sentence for people.
            rank: the rank held responsible, by default this one.
        """
        responsible = self.rank if rank is None else rank
        self.core.fail(PeerFailure(responsible, phase, reason=reason).to_tuple())
