"""Active groups: the replicas' process group, built by its members only."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from pipetransformer import _C
from pipetransformer.autodp.backends import Backends, make_backends, nccl_serves
from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.connecting import Connecting, address_keys
from pipetransformer.autodp.plane import SLICE, ControlPlane
from pipetransformer.autodp.same_call import said_at, values_at

logger = logging.getLogger(__name__)

_BARRIER = "the end of the run"
"""What members are at that wait for each other: the engine does so there alone."""

_FIRST_BYTES = 32 << 10
"""Size of the first message of `broadcast_bytes`; what is longer needs a second."""


class ActiveGroup:
    """The processes that drive a pipeline each; made by `build_group`.

    Its collectives, and those of a `DistributedDataParallel` over
    `process_group`, raise as soon as the run fails, whatever they wait for.

    Attributes:
        name: Where the members left their addresses; no two groups share one.
        members: World ranks in the order of the group's ranks.
        generation: The plane's when the group was built; a later one cannot use it.
        num_devices: How many devices of each member it connects; 0: the host's alone.
    """

    def __init__(
        self,
        plane: ControlPlane,
        core: _C.autodp.ActiveGroup,
        *,
        name: str,
        members: Sequence[int],
        num_devices: int = 0,
    ) -> None:
        self._plane = plane
        self._core = core
        self.name = name
        self.members = tuple(members)
        self.generation = plane.generation
        self.num_devices = num_devices

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group for ``DistributedDataParallel(process_group=...)``."""
        return self._core.process_group

    @property
    def rank(self) -> int:
        """Index of this process in `members`."""
        return self.members.index(self._plane.rank)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def all_reduce_(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce `tensor` of any shape over the members, in place; returns it."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        self._run(lambda: self.process_group.allreduce([tensor], options))
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite `tensor` with that of member index `source`; returns it."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._run(lambda: self.process_group.broadcast([tensor], options))
        return tensor

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Exchange one byte string of any length per member."""
        gathered = self.all_gather_rows(_to_tensor(value))
        return [_to_bytes(row) for row in gathered]

    def broadcast_bytes(self, value: bytes, source: int) -> bytes:
        """Return the byte string of any length of member index `source`.

        Args:
            value: Read on the source only.
            source: Index in `members`.
        """
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        if self.rank == source:
            head = len(value).to_bytes(8, "little") + value[: _FIRST_BYTES - 8]
            first[: len(head)] = _to_tensor(head)
        received = _to_bytes(self.broadcast_(first, source))
        length = int.from_bytes(received[:8], "little")
        begin = received[8 : 8 + length]
        if length == len(begin):
            return begin
        rest = _to_tensor(value[len(begin) :])
        if self.rank != source:
            rest = torch.empty(length - len(begin), dtype=torch.uint8)
        return begin + _to_bytes(self.broadcast_(rest, source))

    def all_gather_rows(
        self, rows: torch.Tensor, *, timeout: timedelta | None = None
    ) -> list[torch.Tensor]:
        """Gather `rows`, shape (n, ...) with an n of its own on each member.

        Args:
            rows: Trailing dimensions and dtype must agree.
            timeout: deadline; None: ``AutoDPConfig.group_timeout``.

        Returns:
            The members' tensors in the order of `members`.
        """
        options = AllgatherOptions()
        if timeout is not None:
            options.timeout = timeout
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        mine = torch.tensor([rows.shape[0]], dtype=torch.int64)
        self._run(lambda: self.process_group.allgather([counts], [mine], options))
        sizes = [int(count) for count in counts]
        longest = max(sizes)
        if longest == 0:
            return [rows.detach().clone() for _ in sizes]
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows.detach()
        gathered = [torch.empty_like(padded) for _ in sizes]
        self._run(lambda: self.process_group.allgather([gathered], [padded], options))
        return [part[:size] for part, size in zip(gathered, sizes, strict=True)]

    def barrier(self, *, timeout: timedelta | None = None) -> None:
        """Wait until every member has come here.

        Args:
            timeout: deadline; None: ``AutoDPConfig.group_timeout``.

        Raises:
            RuntimeError: members are at other calls, which say so: `gather_at`.
        """
        said = _to_tensor(said_at(_BARRIER, b""))
        told = [_to_bytes(row) for row in self.all_gather_rows(said, timeout=timeout)]
        values_at(_BARRIER, told, self)

    def check_ended(self) -> None:
        """Look at collectives on devices, once the host has waited for these.

        NCCL gives one up by itself when the way to a peer is gone; it ends as if it
        were done.

        Raises:
            PeerFailure: one of them was given up, or the run has failed.
        """
        with self._plane.guard():
            self._core.check_ended()

    def retire(self) -> None:
        """Take the group apart in the background, without waiting for peers or store.

        Call it on every member once none uses the group any more; may be called
        again, after a failure, and after the plane was closed (it then takes up to
        a second if a collective is stuck). Collectives raise RuntimeError afterwards.
        """
        logger.debug("retiring the active group '%s'", self.name)
        self._core.retire()
        self._plane.delete_later(*address_keys(self._plane, self.name, self.rank))

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Same as `ControlPlane.guard`."""
        return self._plane.guard()

    def _run(self, start: Callable[[], dist.Work]) -> None:
        with self._plane.guard():
            self._plane.check()
            work = start()
            while not _C.autodp.wait_done(work, SLICE):
                pass  # back in Python: signal handlers run
            work.wait()


def _to_tensor(value: bytes) -> torch.Tensor:
    if not value:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _to_bytes(row: torch.Tensor) -> bytes:
    row = row.contiguous()
    if not row.numel():
        return b""
    # Not `string_at`, which counts in 32 bits.
    return (ctypes.c_char * row.numel()).from_address(row.data_ptr()).raw


def build_group(
    plane: ControlPlane,
    *,
    name: str,
    members: Sequence[int],
    config: AutoDPConfig | None = None,
    devices: Sequence[torch.device] = (),
    shares_devices: bool = False,
    given_up: Callable[[], bool] | None = None,
) -> ActiveGroup:
    """Build the active group `name`; every member calls this, nobody else.

    Blocks until all members are connected. Other groups of the same processes may
    live on.

    Args:
        plane: the run's control plane.
        name: unique in the generation, e.g. ``"g/3"`` for plan epoch 3.
        members: world ranks of this generation, equal on all of them; their order
            gives the ranks of the group.
        config: deadlines; the plane's by default.
        devices: what this member's stages are on, of one type; none: the host. Their
            tensors go by NCCL where torch has it, each device with a communicator of
            its own, else by gloo through the host. All members give as many, in the
            same order of stages. What is on the host goes by gloo.
        shares_devices: members share a device, which NCCL refuses: gloo does it all.
        given_up: asked every 100 ms whether the group is not wanted any more; the
            backend's own attempts then end in the background.

    Raises:
        ValueError: members that are not distinct ranks of the run, or that this
            rank is not among; devices of several types.
        Unreachable: other members did not connect by ``protocol_timeout``, or before
            it was given up.
        RuntimeError: this rank cannot have such a group, or came too late for it.
        PeerFailure: the run failed meanwhile.
    """
    config = config or plane.config
    _check_members(plane, members)
    device_type = _type_of(devices)
    name = plane.own_key(name)
    # Through the plane's own connection: a wait for a dead member blocks nobody.
    store = c10d.PrefixStore(name, plane.core.group_store())
    made: Backends | None = None
    if len(members) > 1:
        connecting = Connecting(
            plane,
            name,
            members,
            timeout=config.protocol_timeout,
        )
        build = functools.partial(
            make_backends,
            store,
            list(members).index(plane.rank),
            len(members),
            timeout=config.protocol_timeout,
            links=plane.info.links,
            devices=devices if nccl_serves(device_type) and not shares_devices else (),
        )
        made = connecting.connect(build, given_up or (lambda: False))
    with plane.guard():
        core = _C.autodp.ActiveGroup(
            plane.core,
            store,
            made and made.on_host,
            made and made.on_device,
            device_type=device_type,
            timeout=config.group_timeout,
        )
    del made  # the group owns them: their last reference must go in the background
    logger.debug("built the active group '%s' of ranks %s", name, list(members))
    return ActiveGroup(
        plane, core, name=name, members=members, num_devices=len(devices)
    )


def _type_of(devices: Sequence[torch.device]) -> str:
    types = {device.type for device in devices} or {"cpu"}
    if len(types) > 1:
        raise ValueError(
            f"devices: expected devices of one type, got {[str(d) for d in devices]}"
        )
    return types.pop()


def _check_members(plane: ControlPlane, members: Sequence[int]) -> None:
    valid = len(set(members)) == len(members) and set(members) <= set(plane.members)
    if not valid or plane.rank not in members:
        raise ValueError(
            f"members: expected distinct ranks of {list(plane.members)} with this "
            f"rank {plane.rank} among them, got {list(members)}"
        )
