"""Makes the real backend of an active group, over the interface that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pipetransformer.network import Link


def make_backend(
    store: c10d.Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    device_type: str,
    links: Sequence[Link] = (),
) -> c10d.Backend:
    """Connect the members of a group; blocks until all are there.

    Args:
        store: where members leave their addresses.
        rank: of this process in the group.
        size: number of members.
        timeout: deadline of connecting.
        device_type: ``"cpu"`` (gloo) or ``"cuda"`` (nccl).
        links: what gloo listens at; none: gloo chooses. NCCL chooses by itself, or
            as ``NCCL_SOCKET_IFNAME`` says.

    Raises:
        RuntimeError: a member was not there by the deadline.
    """
    if device_type != "cpu":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast(c10d.Backend, dist.ProcessGroupNCCL(store, rank, size, options))
    made: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    if not links:
        return cast(c10d.Backend, made(store, rank, size, timeout))
    gloo = made._Options()
    gloo._timeout = timeout
    gloo._devices = [made.create_device(hostname=link.address) for link in links]
    gloo._threads = 2 * len(links)
    return cast(c10d.Backend, made(store, rank, size, gloo))


_ABSENCE = ("timeout", "timed out", "refused", "reset", "closed")


def is_absence(error: Exception) -> bool:
    """Tell whether `make_backend` failed since another member did not come, or went."""
    if isinstance(error, dist.DistStoreError):  # left no address by the deadline
        return True
    # Gloo and NCCL report the network's errors as RuntimeErrors: only their text tells.
    # The one place that reads an error's text.
    return any(word in str(error).lower() for word in _ABSENCE)
