"""Finds this process's place among the ranks, and the store they share.

The one module that reads the variables torchrun sets.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from pipetransformer import _C
from pipetransformer.autodp.cards import Cards, Job
from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.links import LinkChoice, host_of
from pipetransformer.autodp.listening import (
    handing_over,
    listening_socket,
    listens_itself,
)
from pipetransformer.autodp.meeting import Meeting
from pipetransformer.autodp.secret import find_secret
from pipetransformer.network import Link

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_WATCHED_S = 600.0  # for ranks that have not joined, where torchrun watches them
_LOOK_S = 0.1  # between two looks at a thread that joins; signals are handled


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


class RunStore(PrefixStore):
    """The keys of one run, with the connections that its control plane takes.

    They are made before the ranks meet: see Note [Slow starts] in ``watcher.cpp``.

    Args:
        prefix: What the run's keys start with.
        store: All keys, as the ranks see them.
        connections: Further connections to it, one for each thread of a plane.
        seal: Of its messages, None without a secret.
        server: The store below the seal, which lives as long as the run's.
    """

    def __init__(
        self,
        prefix: str,
        store: Store,
        connections: tuple[Store, Store],
        *,
        seal: _C.autodp.StoreSeal | None,
        server: Store,
    ) -> None:
        super().__init__(prefix, store)
        self.seal = seal
        self._server = server
        first, second = connections
        self.connections = PrefixStore(prefix, first), PrefixStore(prefix, second)


def connect(config: AutoDPConfig | None = None) -> tuple[LaunchInfo, Store]:
    """Join the other ranks of this run.

    A process started alone is a world of one. Otherwise the store is the default
    process group's where the user made one, the launcher's where torchrun serves
    one, and else rank 0 serves it at ``MASTER_ADDR:MASTER_PORT``. Returns once
    every rank has joined. Engines of one process may connect one after the other,
    and several runs may share a store: each gets a prefix of its own.

    Args:
        config: ``store_timeout``, heartbeats, ``run_name``, ``interface`` and
            ``secret`` are used.

    Returns:
        This process's place, and a store that holds this run's keys only. A message
        plane is to be made of both at once: this rank does not beat in between.

    Raises:
        ValueError: a launcher's variable that is missing or no number; an interface
            that this machine does not have; a secret that others may read, or that is
            too short.
        PeerFailure: the store or a rank was not there by the deadline, a rank that
            had joined is gone, or the store is another job's.
        OSError: the secret's file cannot be read.
    """
    config = config or AutoDPConfig()
    place = _read_place(os.environ)
    choice = LinkChoice(config, os.environ)
    if place.world_size == 1:
        return replace(place, run_id=uuid.uuid4().hex), HashStore()
    return _Joining(place, choice, config).result()


class _Joining:
    """Joins the other ranks on a thread: a store that stops never answers it.

    Args:
        place: This process's place, without a run.
        choice: Of the links.
        config: As for `connect`.
    """

    def __init__(
        self, place: LaunchInfo, choice: LinkChoice, config: AutoDPConfig
    ) -> None:
        self._place = place
        self._choice = choice
        self._config = config
        self._timeout_s = config.store_timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout_s
        # Ranks may come late: they have loaded data and models. One that torchrun
        # started and that never comes has died, and torchrun then ends the others.
        self._watched = "TORCHELASTIC_RUN_ID" in os.environ
        self._join_s = max(self._timeout_s, _WATCHED_S if self._watched else 0.0)
        self._joins_by = time.monotonic() + self._join_s
        self._meeting: Meeting | None = None
        self._given_up = threading.Event()
        self._joined: tuple[LaunchInfo, Store] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="pt-join", daemon=True)

    def result(self) -> tuple[LaunchInfo, Store]:
        """Wait for the thread; see `connect`."""
        # Until all are connected a store may stall: Note [Slow starts] in watcher.cpp.
        timeout_s = max(
            self._config.heartbeat_timeout.total_seconds(), self._timeout_s / 2
        )
        answers = _C.autodp.LivenessTracker(
            timeout_s, self._timeout_s + timeout_s, time.monotonic()
        )
        try:
            self._thread.start()
            while self._thread.is_alive():
                self._thread.join(_LOOK_S)
                meeting = self._meeting
                looks = meeting.looks if meeting is not None else None
                if not answers.observe(looks, time.monotonic()):
                    raise self._store_failure(timeout_s, "the store does not answer")
        finally:
            self._given_up.set()  # unless it is over
        if self._error is not None:
            raise self._error
        if self._joined is None:
            raise RuntimeError("connect: expected a result; please report")
        return self._joined

    def _store_failure(self, deadline_s: float | None, reason: str) -> PeerFailure:
        rank = self._place.store_rank
        return PeerFailure(rank, "connect", deadline_s=deadline_s, reason=reason)

    def _run(self) -> None:
        try:
            self._joined = self._join()
        except Exception as error:  # raised by `result`, on the caller's thread
            self._error = error

    def _join(self) -> tuple[LaunchInfo, Store]:
        while True:
            self._meeting = None
            try:
                return self._meet()
            except PeerFailure:
                raise
            except (RuntimeError, TimeoutError) as error:
                problem = error
            if self._given_up.is_set():
                raise problem
            text = str(problem).split("\n", 1)[0]
            text = _C.core.plain_text(text.encode(errors="replace"))
            lost = not isinstance(problem, TimeoutError)
            if lost and self._meeting is not None and self._meeting.opened:
                raise self._store_failure(None, f"the store is lost: {text}")
            # Else it may be that of the engine before this one, just going away.
            if time.monotonic() + _RETRY_S >= self._deadline:
                break
            time.sleep(_RETRY_S)
        raise PeerFailure(
            None,
            "connect",
            deadline_s=self._timeout_s if lost else self._join_s,
            reason=f"store: expected all {self._place.world_size} ranks"
            f"{_of_run(self._config)} at {_address()}, got: {text}",
        ) from problem

    def _meet(self) -> tuple[LaunchInfo, Store]:
        """Meet the others; agree on a run id that no other run has, and on links."""
        config = self._config
        self._place, store = _open_store(self._place, self._deadline)
        if self._given_up.is_set():
            raise RuntimeError("connect: expected somebody to wait for it")
        address = self._choice.towards(host_of(store))
        seal = self._seal()
        plain = store
        if seal is not None:
            store = seal.sealed(store)
        place, shared = self._place, _cloned(store)
        root = f"pt/name/{config.run_name}" if config.run_name else "pt"
        job = Job.here(
            place.world_size, config.run_name, os.environ, sealed=seal is not None
        )
        # Only ranks that were launched together meet. torchrun's count of restarts does
        # not tell their attempts apart: a node's counts only failures of its own.
        together = "/".join(filter(None, (str(place.world_size), job.launch)))
        ours = place.store_rank is not None
        cards = Cards(plain, place.rank, job, ours=ours)
        meeting = Meeting(
            store,
            f"{root}/meet/{together}",
            place.rank,
            place.world_size,
            config,
            self._given_up,
            cards,
            watched=self._watched,
        )
        self._meeting = meeting
        run_id, addresses = meeting.attend(
            address, self._joins_by, told_by=self._deadline
        )
        links = self._choice.settle(addresses)
        if "LOCAL_WORLD_SIZE" not in os.environ and (other := cards.apart()):
            logger.warning(
                "rank %d is not on '%s' as rank 0 is, but all ranks are taken for "
                "those of one node: set LOCAL_WORLD_SIZE (processes of a node) and "
                "LOCAL_RANK",
                place.rank,
                other,
            )
        logger.debug("rank %d joined run %s", place.rank, run_id)
        place = replace(place, run_id=run_id, links=links)
        return place, RunStore(
            f"{root}/{run_id}", store, shared, seal=seal, server=plain
        )

    def _seal(self) -> _C.autodp.StoreSeal | None:
        secret = find_secret(
            self._config.secret,
            os.environ,
            makes=self._place.rank == 0,
            deadline=self._joins_by,  # rank 0 makes it when its script comes here
            given_up=self._given_up.is_set,
        )
        return None if secret is None else _C.autodp.StoreSeal(secret)


def _cloned(store: Store) -> tuple[Store, Store]:
    shared: Any = store  # clone() misses in its stub
    return shared.clone(), shared.clone()


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
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if place.rank == store_rank:
        try:
            store = _serve(port, timeout, place)
        except OSError as error:  # the port may be free in a moment
            raise RuntimeError(str(error)) from error
        except UnicodeError:
            raise ValueError(
                f"MASTER_ADDR: expected a name or an address, got {_host()!r:.80}"
            ) from None
    else:
        store = TCPStore(
            _host(), port, is_master=False, timeout=timeout, wait_for_workers=False
        )
    return replace(place, store_rank=store_rank), store


_served: weakref.WeakSet[TCPStore] = weakref.WeakSet()
"""The stores of this process's engines that it serves; those of a port share one."""

_warned_ports: set[int] = set()


def _serve(port: int, timeout: timedelta, place: LaunchInfo) -> TCPStore:
    # Held until the new one is there: a server goes with the last of its stores.
    held = [store for store in _served if store.port == port]
    listening, taken = (None, None) if held else _try_to_listen(port, place)
    with contextlib.ExitStack() as stack:
        descriptor = None
        if listening is not None:
            descriptor = stack.enter_context(handing_over(listening))
        try:
            store = TCPStore(
                _host(),
                port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=descriptor,
            )
        except RuntimeError:
            if taken is not None:  # torch joins no server that shares nothing
                raise taken from None
            raise
    _served.add(store)
    return store


def _try_to_listen(
    port: int, place: LaunchInfo
) -> tuple[socket.socket | None, OSError | None]:
    """Bind the store's port.

    Returns:
        The socket, None to let torch bind; and why it could not be bound where this
        process itself has the port: torch may serve a store there already, such as
        that of a default group which is gone, and then shares it.

    Raises:
        OSError: as `listening_socket`.
    """
    one_node = "LOCAL_WORLD_SIZE" in os.environ and place.num_nodes == 1
    try:
        listening = listening_socket(_host(), port, one_node=one_node)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not listens_itself(port):
            raise
        return None, error
    if listening is None and port not in _warned_ports:
        _warned_ports.add(port)
        logger.warning(
            "the store listens on every interface of this machine, port %d: "
            "MASTER_ADDR %s names none of its addresses that all ranks reach",
            port,
            _host(),
        )
    return listening, None
