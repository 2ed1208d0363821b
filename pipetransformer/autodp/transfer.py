"""Moves state between replicas and compares it afterwards."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from pipetransformer import _C
from pipetransformer._extension import hash_bytes
from pipetransformer.autodp.group import ActiveGroup


def broadcast_tensors(
    group: ActiveGroup,
    tensors: Sequence[torch.Tensor],
    *,
    source: int,
    bucket_bytes: int = 64 << 20,
) -> int:
    """Overwrite `tensors` on every member with those of member `source`, bitwise.

    Args:
        group: the members; all of them call this.
        tensors: same number, order, shapes and dtypes on all members; strides are
            free, and so are devices that change at the same places. Leaves that
            require grad are written in place.
        source: index in ``group.members``.
        bucket_bytes: small tensors travel together in buffers of at most this size.

    Returns:
        The bytes moved.

    Raises:
        ValueError: the layouts differ from the source's.
        PeerFailure: the run failed meanwhile.
    """
    with group.guard():
        return _C.autodp.broadcast_tensors(
            group.process_group,
            list(tensors),
            source=source,
            bucket_bytes=bucket_bytes,
        )


def hash_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Hash dtype, shape and bits of each tensor, whatever its strides and device."""
    tensors = dict(named)
    hashes = _C.autodp.hash_replica_tensors(list(tensors.values()))
    return dict(zip(tensors, hashes, strict=True))


def compare_hashes(group: ActiveGroup, hashes: Mapping[str, int]) -> None:
    """Check that all members hold the same tensors.

    One number is exchanged; names and hashes only where it differs.

    Args:
        group: the members; all of them call this.
        hashes: from `hash_tensors`, in the same order on all members.

    Raises:
        RuntimeError: names the first tensor that differs, and the rank where.
    """
    mine = list(hashes.items())
    short = "\0".join(hashes).encode() + array("Q", hashes.values()).tobytes()
    if _same_everywhere(group, hash_bytes(short)):
        return
    others = group.all_gather_bytes(json.dumps(mine).encode())
    for member, blob in zip(group.members, others, strict=True):
        theirs = [(str(name), int(value)) for name, value in json.loads(blob)]
        if theirs == mine:
            continue
        for here, there in zip(mine, theirs, strict=False):
            if here != there:
                raise RuntimeError(
                    f"replica state: expected equal tensors on all replicas, got a "
                    f"different '{here[0]}' on rank {member}"
                )
        raise RuntimeError(
            f"replica state: expected {len(mine)} tensors on all replicas, got "
            f"{len(theirs)} on rank {member}"
        )


def _same_everywhere(group: ActiveGroup, value: int) -> bool:
    """Tell every member whether all of them hold the same number of 64 bits."""
    signed = value - (1 << 63)
    # ~x falls as x grows, so the largest ~x belongs to the smallest x.
    largest, of_smallest = group.all_reduce_(
        torch.tensor([signed, ~signed]), dist.ReduceOp.MAX
    ).tolist()
    return bool(largest == ~of_smallest)
