"""Which samples form a batch, and which replica takes which of them.

Samples belong to a node for the whole run, so that a cache on the node keeps its
hits. Each epoch a node shuffles its own samples; global batch ``b`` is the union of
the nodes' ``b``-th slices, and the replicas of a node divide its slice. Hence the
pipeline length and the number of replicas never change which samples form a batch.
With weights a node draws as many of its own instead, each time from all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler


class ElasticSampler(Sampler[list[int]]):
    """Yields this replica's sample ids of each global batch of an epoch.

    Every sample comes once per epoch, without padding duplicates, or with `weights` as
    many are drawn with replacement; the last batch may be short, and a replica's share
    of it empty. All replicas yield equally many lists.

    Args:
        num_samples: samples of the dataset, ids ``0 .. num_samples - 1``.
        batch_size: rows of a GLOBAL batch, over all replicas of all nodes.
        seed: of the node assignment and of the shuffles.
        num_nodes: nodes that own samples.
        node: this node, ``0 .. num_nodes - 1``; None: whole batches, in which the
            slices follow each other. So a pass goes on where other nodes than those
            that own its samples have to finish it.
        replicas_on_node: replicas that divide the slice of `node`.
        replica_on_node: this replica, ``0 .. replicas_on_node - 1``.
        drop_last: leave out a short last batch.
        min_rows: of a replica's share; where a slice has fewer for each replica, only
            some take part, and the shares of the others are empty.
        by_home: order the rows of each slice by the places of the samples in a fixed
            permutation, so that a replica takes much the same samples in every epoch,
            and shares stay equal.
        weights: of the samples, as `checked_weights` returns them; None: none are
            drawn.

    Raises:
        ValueError: if an argument is out of its range; no sample of a node has weight.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        num_nodes: int = 1,
        node: int | None = 0,
        replicas_on_node: int = 1,
        replica_on_node: int = 0,
        drop_last: bool = False,
        min_rows: int = 1,
        by_home: bool = False,
        weights: Tensor | None = None,
    ) -> None:
        _check_positive("num_samples", num_samples)
        _check_positive("batch_size", batch_size)
        _check_positive("min_rows", min_rows)
        _check_member("node", node or 0, "num_nodes", num_nodes)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.num_nodes = num_nodes
        self.node = node
        self.drop_last = drop_last
        self.min_rows = min_rows
        self.by_home = by_home
        self.epoch = 0
        self.position = 0
        self.set_replica(
            replicas_on_node=replicas_on_node, replica_on_node=replica_on_node
        )
        assignment = _permutation(num_samples, "nodes", seed)
        self._owners = range(num_nodes) if node is None else range(node, node + 1)
        self._owned = {owner: assignment[owner::num_nodes] for owner in self._owners}
        self._home = assignment.argsort() if by_home else None
        self._sums: dict[int, Tensor] = {}
        if weights is not None:
            self._sums = {
                owner: weights[owned].cumsum(0) for owner, owned in self._owned.items()
            }
            # Of all nodes: each of them refuses.
            parts = [weights[assignment[each::num_nodes]] for each in range(num_nodes)]
            if not all(len(part) == 0 or part.sum() > 0 for part in parts):
                raise ValueError(
                    "weights: expected a positive one among the samples of each of the "
                    f"{num_nodes} nodes, got none on one"
                )

    @property
    def num_batches(self) -> int:
        """Global batches of a whole pass."""
        full, short = divmod(self.num_samples, self.batch_size)
        return full + (short > 0 and not self.drop_last)

    def __len__(self) -> int:
        """Return the number of batches from the position to the end of the pass."""
        return self.num_batches - self.position

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of ids; later calls of the setters do not change this pass."""
        return (ids.tolist() for ids in self.shares())

    def shares(self) -> list[Tensor]:
        """Return what `__iter__` yields, each batch's ids as ``(rows,)`` int64."""
        orders = {node: self._order(node) for node in self._owned}
        return [
            self._share(batch, orders)
            for batch in range(self.position, self.num_batches)
        ]

    def _order(self, node: int) -> Tensor:
        """Return the samples that a node gives in this epoch, in order."""
        owned = self._owned[node]
        generator = _generator("epoch", self.seed, self.epoch, node)
        sums = self._sums.get(node)
        if sums is None or len(owned) == 0:
            return owned[torch.randperm(len(owned), generator=generator)]
        drawn = torch.rand(len(owned), dtype=torch.float64, generator=generator)
        places = torch.searchsorted(sums, drawn * sums[-1], right=True)
        # A product may round up to the whole sum: to the last one with a weight.
        return owned[places.clamp(max=int(torch.searchsorted(sums, sums[-1])))]

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass, which starts at its first batch."""
        if epoch < 0:
            raise ValueError(f"epoch: expected a number >= 0, got {epoch}")
        self.epoch = epoch
        self.position = 0

    def set_position(self, batch: int) -> None:
        """Start the next pass at global batch `batch`, to resume within an epoch."""
        if not 0 <= batch <= self.num_batches:
            raise ValueError(
                f"position: expected a batch in 0..{self.num_batches}, got {batch}"
            )
        self.position = batch

    def set_replica(self, *, replicas_on_node: int, replica_on_node: int) -> None:
        """Divide the node's slices anew; the batches stay as they are."""
        _check_member(
            "replica_on_node", replica_on_node, "replicas_on_node", replicas_on_node
        )
        self.replicas_on_node = replicas_on_node
        self.replica_on_node = replica_on_node

    def global_rows(self, batch: int) -> int:
        """Rows of global batch `batch` over all nodes and replicas."""
        begin = batch * self.batch_size
        return min(begin + self.batch_size, self.num_samples) - begin

    def _share(self, batch: int, orders: Mapping[int, Tensor]) -> Tensor:
        # Positions 0, 1, 2, ... of the epoch go round the nodes, and batch b holds
        # positions b * batch_size and on: each node's share is within one sample of
        # the others', and the shares add up to the batch, whatever divides what.
        begin = batch * self.batch_size
        end = begin + self.global_rows(batch)
        slices = [
            order[self._count_before(begin, node) : self._count_before(end, node)]
            for node, order in orders.items()
        ]
        if self._home is not None:
            slices = [ids[self._home[ids].argsort()] for ids in slices]
        whole = slices[0] if len(slices) == 1 else torch.cat(slices)
        # The node's first replicas have rows, where there are any.
        parts = min(self.replicas_on_node, max(1, len(whole) // self.min_rows))
        first, last = (
            len(whole) * min(part, parts) // parts
            for part in (self.replica_on_node, self.replica_on_node + 1)
        )
        return whole[first:last]

    def _count_before(self, position: int, node: int) -> int:
        return -((node - position) // self.num_nodes)


def seed_of(*parts: object) -> int:
    """Mix what names a random stream into a seed for ``torch.Generator``."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def checked_weights(weights: Any, num_samples: int) -> Tensor:
    """Return the weights that samples are drawn by, ``(num_samples,)`` float64.

    Args:
        weights: Numbers >= 0, some of them positive; they need not add up to 1.
        num_samples: Samples of the dataset.

    Raises:
        TypeError: they are no numbers.
        ValueError: there is not one for each sample; one is negative or not finite;
            all are 0.
    """
    try:
        found = torch.as_tensor(weights).detach().to("cpu", torch.float64, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"weights: expected a number per sample, got {error}") from None
    if found.shape != (num_samples,):
        raise ValueError(
            f"weights: expected a number for each of the {num_samples} samples, got "
            f"shape {tuple(found.shape)}"
        )
    total = found.sum()
    if not bool((found >= 0).all()) or not (total > 0 and total.isfinite()):
        raise ValueError(
            "weights: expected finite numbers >= 0, some of them positive, got "
            f"{found.min().item():g} to {found.max().item():g}"
        )
    return found


def _permutation(size: int, *parts: object) -> Tensor:
    return torch.randperm(size, generator=_generator(*parts))


def _generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*parts))


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: expected a number >= 1, got {value}")


def _check_member(name: str, value: int, count_name: str, count: int) -> None:
    _check_positive(count_name, count)
    if not 0 <= value < count:
        raise ValueError(
            f"{name}: expected a number in 0..{count - 1} ({count_name} = {count}), "
            f"got {value}"
        )
