"""Finds this process's place among the ranks, and the store they share.

The one module that reads the variables torchrun sets.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.links import LinkChoice, host_of
from pipetransformer.network import Link

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_RETRY_S = 0.2


@dataclass(frozen=True)
class LaunchInfo:
    """Where this process stands in the run.

    Args:
        rank: index of the process in the run.
        world_size: number of processes.
        local_rank: index of the process on its node.
        local_world_size: number of processes on this node.
        node: index of the node.
        num_nodes: number of nodes.
        run_id: name of this run, equal on all ranks and never used twice.
        launched: whether a launcher started the process.
        store_rank: the rank that serves the store, None when none of them does.
        links: what this process's CPU groups listen at; none in a world of one.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int
    run_id: str
    launched: bool
    store_rank: int | None = None
    links: tuple[Link, ...] = ()

    @property
    def transport(self) -> str:
        """What the CPU groups' bytes travel over, for people."""
        return ", ".join(map(str, self.links)) or "no network"


def connect(config: AutoDPConfig | None = None) -> tuple[LaunchInfo, Store]:
    """Join the other ranks of this run.

    A process started alone is a world of one. Otherwise the store is the default
    process group's where the user made one, the launcher's where torchrun serves
    one, and else rank 0 serves it at ``MASTER_ADDR:MASTER_PORT``. Returns once
    every rank has joined. Engines of one process may connect one after the other,
    and several runs may share a store: each gets a prefix of its own.

    Args:
        config: ``store_timeout``, ``run_name`` and ``interface`` are used.

    Returns:
        This process's place, and a store that holds this run's keys only.

    Raises:
        ValueError: a launcher's variable that is missing or no number; an interface
            that this machine does not have.
        PeerFailure: the store or a rank was not there by the deadline.
    """
    config = config or AutoDPConfig()
    timeout_s = config.store_timeout.total_seconds()
    place = _read_place(os.environ)
    choice = LinkChoice(config, os.environ)
    root = f"pt/name/{config.run_name}" if config.run_name else "pt"
    if place.world_size == 1:
        return replace(place, run_id=uuid.uuid4().hex), HashStore()
    deadline = time.monotonic() + timeout_s
    problem: Exception
    while True:
        try:
            place, store = _open_store(place, deadline)
            run_id, links = _meet(place, store, root, choice, deadline)
        except (RuntimeError, TimeoutError) as error:
            # The store of the engine before this one may just be going away.
            problem = error
        else:
            logger.debug("rank %d joined run %s", place.rank, run_id)
            place = replace(place, run_id=run_id, links=links)
            return place, PrefixStore(f"{root}/{run_id}", store)
        if time.monotonic() + _RETRY_S >= deadline:
            break
        time.sleep(_RETRY_S)
    text = str(problem).split("\n", 1)[0]
    raise PeerFailure(
        None,
        "connect",
        deadline_s=timeout_s,
        reason=f"store: expected all {place.world_size} ranks{_of_run(config)} at "
        f"{_address()}, got: {text}",
    ) from problem


def _of_run(config: AutoDPConfig) -> str:
    return f" of run '{config.run_name}'" if config.run_name else ""


def _address() -> str:
    return f"{_host()}:{os.environ.get('MASTER_PORT')}"


def _host() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(
            f"{name}: expected a number set by the launcher, got {text!r}"
        ) from None


def _read_place(environ: Mapping[str, str]) -> LaunchInfo:
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif "RANK" in environ or "WORLD_SIZE" in environ:
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    else:
        return LaunchInfo(0, 1, 0, 1, 0, 1, "", launched=False)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"RANK: expected a number below WORLD_SIZE {world_size}, got {rank}"
        )
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
    if local_world_size < 1 or world_size % local_world_size != 0:
        raise ValueError(
            f"LOCAL_WORLD_SIZE: expected a number that divides WORLD_SIZE {world_size} "
            f"(nodes with as many processes each), got {local_world_size}"
        )
    local_rank = _number(environ, "LOCAL_RANK", rank % local_world_size)
    node = _number(environ, "GROUP_RANK", rank // local_world_size)
    first = node * local_world_size
    if local_world_size < world_size and rank != first + local_rank:
        raise ValueError(
            "RANK: expected GROUP_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK, which is "
            f"{first + local_rank} (the ranks of a node follow each other), got {rank}"
        )
    return LaunchInfo(
        rank,
        world_size,
        local_rank,
        local_world_size,
        node,
        world_size // local_world_size,
        "",
        launched=True,
    )


def _open_store(place: LaunchInfo, deadline: float) -> tuple[LaunchInfo, Store]:
    if dist.is_initialized():
        # A client of our own: the user's must not wait behind it.
        default: Any = c10d._get_default_store()  # clone() misses in its stub
        return place, default.clone()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _number(os.environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT: expected a port from 1 to 65535, got {port}")
    store_rank = None if agent else 0
    store = TCPStore(
        _host(),
        port,
        is_master=place.rank == store_rank,
        timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return replace(place, store_rank=store_rank), store


def _meet(
    place: LaunchInfo, store: Store, root: str, choice: LinkChoice, deadline: float
) -> tuple[str, tuple[Link, ...]]:
    """Agree on a run id that no earlier run on this store had, and on links."""
    address = choice.towards(host_of(store))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    mine = f"{root}/join/{restart}/{place.rank}"
    # The n-th run of a rank meets the n-th run of all others.
    ticket = store.add(mine, 1)
    meeting = f"{root}/meet/{restart}/{ticket}"
    if place.rank == 0:
        store.set(f"{meeting}/id", uuid.uuid4().hex)
    store.set(f"{meeting}/{place.rank}", address)
    keys = [f"{meeting}/{rank}" for rank in range(place.world_size)]
    while not store.check([f"{meeting}/id", *keys]):
        if time.monotonic() >= deadline:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"ranks {absent} did not join")
        time.sleep(_POLL_S)
    links = choice.settle(bytes(store.get(key)).decode() for key in keys)
    return bytes(store.get(f"{meeting}/id")).decode(), links
