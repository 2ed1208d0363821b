"""Which samples a replica loads in a pass, and which it has loaded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pipetransformer._extension import hash_bytes
from pipetransformer.data import Batch
from pipetransformer.data.division import Division
from pipetransformer.data.loading import ElasticSampler, batches
from pipetransformer.data.own_loader import own_batches, repeated_batches
from pipetransformer.run.layout import Layout

_BATCHES_AHEAD = 3


@dataclasses.dataclass(frozen=True)
class Loading:
    """What the user asked the batches of a pass to be; see ``engine.batches``."""

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    pin_memory: bool
    drop_last: bool
    min_rows: int = 1
    division: Division = Division()
    loader: DataLoader[Any] | None = None
    views: int | None = None
    weights: Tensor | None = None

    @property
    def weights_hash(self) -> str:
        """Return what tells weights apart; empty: there are none."""
        if self.weights is None:
            return ""
        return f"{hash_bytes(self.weights.numpy().tobytes()):016x}"

    def batches(self, sampler: ElasticSampler) -> Generator[Batch, None, None]:
        """Load what the sampler names."""
        if self.loader is not None and self.views is not None:
            division, views = self.division, self.views
            return repeated_batches(self.loader, sampler, division, views)
        if self.loader is not None:
            return own_batches(self.loader, sampler, self.division)
        return batches(
            self.dataset,
            sampler,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            division=self.division,
            views=self.views,
        )

    def one(self, sampler: ElasticSampler) -> Batch:
        """Load the batch at the sampler's position, in this process."""
        here = dataclasses.replace(self, num_workers=0, loader=None).batches(sampler)
        try:
            return next(here)
        finally:
            here.close()


def one_ahead(
    loaded: Generator[Batch, None, None],
    tell: Callable[[Batch | None], None],
    leave: Callable[[], None],
) -> Generator[Batch, None, None]:
    """Yield batches, each when the one after it is loaded, too.

    What loading raises comes where that batch would have come.

    Args:
        loaded: The batches.
        tell: Is given the one after that which is yielded next; None: there is none.
        leave: Is called when no further one is wanted.
    """
    with contextlib.closing(loaded):
        batch = next(loaded, None)
        try:
            while batch is not None:
                following, error = None, None
                try:
                    following = next(loaded, None)
                except Exception as raised:
                    error = raised
                tell(following)
                yield batch
                if error is not None:
                    raise error
                batch = following
        finally:
            tell(None)
            leave()


def asking_ahead(
    loaded: Generator[Batch, None, None],
    lists: Sequence[Sequence[int]],
    ask: Callable[[Sequence[int]], None],
) -> Generator[Batch, None, None]:
    """Yield batches, and ask for the samples of those to come.

    Args:
        loaded: The batches.
        lists: The ids of each, in order.
        ask: Is told the ids of each batch, some batches before it is loaded.
    """
    with contextlib.closing(loaded):
        for ids in lists[:_BATCHES_AHEAD]:
            ask(ids)
        for number, batch in enumerate(loaded, _BATCHES_AHEAD):
            if number < len(lists):
                ask(lists[number])
            yield batch


@dataclasses.dataclass(frozen=True)
class EpochSharding:
    """How the samples of one pass are divided, whatever the plan.

    Attributes:
        loading: What the user asked for.
        seed: Of the run.
        epoch: Of the pass.
        num_nodes: Nodes that own samples: those with a replica when the pass began.
        by_home: A replica takes much the same samples in each pass.
    """

    loading: Loading
    seed: int
    epoch: int
    num_nodes: int
    by_home: bool = False

    def sampler(self, layout: Layout, rank: int, position: int = 0) -> ElasticSampler:
        """Return what names the batches of the replica that `rank` drives.

        Args:
            layout: The active ranks.
            rank: One of them.
            position: The first batch.
        """
        loading, active = self.loading, layout.active
        # Nodes without a replica own no samples; R never falls below the others.
        nodes = sorted(set(layout.nodes))
        if self.num_nodes == len(nodes):
            node: int | None = nodes.index(layout.nodes[active.index(rank)])
            share, index = layout.node_share(rank)
        else:  # the pass was begun by other nodes
            node, share, index = None, len(active), active.index(rank)
        made = ElasticSampler(
            len(loading.dataset),
            loading.batch_size,
            seed=self.seed,
            num_nodes=self.num_nodes,
            node=node,
            replicas_on_node=share,
            replica_on_node=index,
            drop_last=loading.drop_last,
            min_rows=loading.min_rows,
            by_home=self.by_home,
            weights=loading.weights,
        )
        made.set_epoch(self.epoch)
        made.set_position(position)
        return made

    def ids_of(self, layout: Layout, numbers: Sequence[int]) -> Tensor:
        """Return the samples of the batches `numbers`, of all replicas together."""
        lists = [list(self.sampler(layout, rank)) for rank in layout.active]
        ids = [
            sample for part in lists for number in numbers for sample in part[number]
        ]
        return torch.tensor(ids, dtype=torch.int64)
