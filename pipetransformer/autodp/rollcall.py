"""The roll call: survivors of a failure agree on who goes on."""

from __future__ import annotations

import logging
import time

from pipetransformer.autodp import _binding
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.life import PlaneLife

logger = logging.getLogger(__name__)

_POLL_S = 0.02


def survive(plane: PlaneLife, standing: bytes) -> dict[int, bytes]:
    """Bring this rank into the next generation; see `MessagePlane.survive`.

    Members that are known to be dead, or that do not beat for
    ``heartbeat_timeout``, are not waited for. A member that beats but does not call
    `survive` (its main thread is busy with something else) has until
    ``protocol_timeout``, at least twice ``heartbeat_timeout``.
    """
    failure = plane.failure
    if failure is None:
        raise RuntimeError(
            f"survive: expected a failed generation, got generation "
            f"{plane.generation} alive"
        )
    if plane.config.on_peer_failure != "continue":
        raise failure
    _check_own_end(plane)
    if plane.store_lost:
        raise failure
    board = _binding.RollBoard(plane.core, standing)
    _answer_until_closed(plane, board)
    if board.fenced:
        # This rank ends: it must not answer a later roll either.
        plane.fail("fenced", "the other ranks went on without this one")
        _check_own_end(plane)
    standings = board.standings
    _binding.plane_advance(plane.core, sorted(standings))
    logger.warning(
        "rank %d goes on in generation %d with ranks %s after: %s",
        plane.rank,
        plane.generation,
        sorted(standings),
        failure,
    )
    _check_own_end(plane)  # SIGTERM during the roll call
    return standings


def _answer_until_closed(plane: PlaneLife, board: _binding.RollBoard) -> None:
    config = plane.config
    patience = max(config.protocol_timeout, 2 * config.heartbeat_timeout)
    left_s = patience.total_seconds()
    # A job that was stopped as a whole must not cut off who had no time to answer.
    longest_gap_s = config.heartbeat_timeout.total_seconds() / 3
    seen = time.monotonic()
    while not _step(plane, board):
        now = time.monotonic()
        left_s -= min(now - seen, longest_gap_s)
        seen = now
        if left_s <= 0:
            logger.warning("ranks %s beat, but do not answer", board.silent)
            board.on_deadline()
        time.sleep(_POLL_S)


def _step(plane: PlaneLife, board: _binding.RollBoard) -> bool:
    try:
        return board.step()
    except RuntimeError as error:
        loss = _binding.plane_store_loss(plane.core)
        if loss is None:
            raise
        raise PeerFailure.from_tuple(loss) from error


def _check_own_end(plane: PlaneLife) -> None:
    """Raise the failure that ends this rank itself, whatever else has failed."""
    ended = _binding.plane_ended(plane.core)
    if ended is not None:
        raise PeerFailure.from_tuple(ended)
