"""The rendezvous: survivors of a failure agree on who goes on."""

from __future__ import annotations

import logging
import time

from pipetransformer import _C
from pipetransformer.autodp.config import AutoDPConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.02


def meet_survivors(
    core: _C.autodp.ControlPlane, standing: bytes, config: AutoDPConfig
) -> _C.autodp.RendezvousBoard:
    """Answer the rendezvous after a failure, until it is closed.

    Members that are known to be dead, or that do not beat for
    ``heartbeat_timeout``, are not waited for. A member that beats but does not call
    `ControlPlane.survive` (its main thread is busy with something else) has until
    ``protocol_timeout``, at least twice ``heartbeat_timeout``.

    Args:
        core: the plane; its generation has failed.
        standing: what the others need to know of this rank.
        config: deadlines.

    Raises:
        PeerFailure: the store is lost.
    """
    board = core.begin_rendezvous(standing)
    patience = max(config.protocol_timeout, 2 * config.heartbeat_timeout)
    left_s = patience.total_seconds()
    # A job that was stopped as a whole must not cut off who had no time to answer.
    longest_gap_s = config.heartbeat_timeout.total_seconds() / 3
    seen = time.monotonic()
    while not board.step():
        now = time.monotonic()
        left_s -= min(now - seen, longest_gap_s)
        seen = now
        if left_s <= 0:
            logger.warning("ranks %s beat, but do not answer", board.silent)
            board.on_deadline()
        time.sleep(_POLL_S)
    return board
