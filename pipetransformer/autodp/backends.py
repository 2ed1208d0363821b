"""Makes the real backends of an active group, over the interface that was chosen."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pipetransformer.network import Link

_LOOK_S = 0.001


def nccl_serves(device_type: str) -> bool:
    """Tell whether NCCL can carry what is on devices of a type."""
    return device_type == "cuda" and dist.is_nccl_available()


class Backends(NamedTuple):
    """The real backends of a group.

    Attributes:
        on_host: carries what is on the host.
        on_device: carries what is on devices; None: `on_host` does, through the host.
    """

    on_host: c10d.Backend
    on_device: c10d.Backend | None


def make_backends(
    store: c10d.Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    links: Sequence[Link] = (),
    devices: Sequence[torch.device] = (),
) -> Backends:
    """Connect the members of a group; blocks until all are there.

    Args:
        store: where members leave their addresses.
        rank: of this process in the group.
        size: number of members.
        timeout: deadline of connecting.
        links: what gloo listens at; none: gloo chooses. NCCL chooses by itself, or
            as ``NCCL_SOCKET_IFNAME`` says.
        devices: CUDA devices that NCCL connects, of this member; none: gloo alone.

    Raises:
        RuntimeError: a member was not there by the deadline.
    """
    on_host = _make_gloo(store, rank, size, timeout, links)
    if not devices:
        return Backends(on_host, None)
    return Backends(on_host, _make_nccl(store, rank, size, timeout, devices))


def _make_nccl(
    store: c10d.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    devices: Sequence[torch.device],
) -> c10d.Backend:
    # A failure aborts the communicators and is raised as PeerFailure; NCCL's own
    # watchdog would end the process. Only a communicator that does not block can be
    # aborted while it waits for a peer.
    seconds = str(max(1, round(timeout.total_seconds())))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # clean up only
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", seconds)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    inside = c10d.PrefixStore("nccl", store)
    backend: Any = dist.ProcessGroupNCCL(inside, rank, size, options)
    # Now, while this is waited for with a deadline: else the first collective would
    # connect, and a member that is missing by then would hang it. Communicators that
    # do not block are connected by the first collective only, so that is done here.
    for device in devices:
        backend.eager_connect_single_device(device)
    works = [backend.allreduce([torch.zeros(1, device=each)]) for each in devices]
    deadline = time.monotonic() + timeout.total_seconds()
    while not all(work.is_completed() for work in works):
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"NCCL: expected all members within {seconds} s, got a timeout"
            )
        time.sleep(_LOOK_S)
    for work in works:
        work.wait()  # raises what has gone wrong
    return cast(c10d.Backend, backend)


def _make_gloo(
    store: c10d.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    links: Sequence[Link],
) -> c10d.Backend:
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
    """Tell whether `make_backends` failed since a member did not come, or went."""
    if isinstance(error, dist.DistStoreError):  # left no address by the deadline
        return True
    # Gloo and NCCL report the network's errors as RuntimeErrors: only their text tells.
    # The one place that reads an error's text.
    return any(word in str(error).lower() for word in _ABSENCE)
