"""Batches out of a ``DataLoader`` of the user's own."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, cast

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler

from pipetransformer.data.division import Division
from pipetransformer.data.loading import (
    Batch,
    ElasticSampler,
    MapDataset,
    Shares,
    batches,
)


class ShareSampler(Sampler[list[int]]):
    """A batch sampler for a ``DataLoader``: this rank's share of each batch.

    ``engine.sampler`` makes it. Which share that is says the plan in force, so it gives
    lists of ids only while ``engine.batches(loader)`` runs. Empty shares are left out.

    Args:
        num_samples: Samples of the dataset.
        batch_size: Rows of a GLOBAL batch, over all replicas.
        drop_last: Leave out a short last batch.
        weights: That samples are drawn by, see `checked_weights`; None: none are.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        drop_last: bool,
        weights: Tensor | None = None,
    ) -> None:
        self.num_samples = num_samples
        # Not `batch_size` and `drop_last`: those of torch's samplers are of one rank.
        self.global_batch = batch_size
        self.drops_last = drop_last
        self.weights = weights
        self._lists: list[list[int]] | None = None

    def __len__(self) -> int:
        """Return the number of global batches of a whole pass."""
        whole = ElasticSampler(
            self.num_samples, self.global_batch, drop_last=self.drops_last
        )
        return whole.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the lists of ids that were set last.

        Raises:
            ValueError: no pass runs.
        """
        if self._lists is None:
            raise ValueError(
                "engine.sampler: expected a DataLoader in engine.batches(loader), got "
                "a loop over the loader itself"
            )
        return iter(self._lists)

    def set_lists(self, lists: list[list[int]] | None) -> None:
        """Say what the next iteration yields; None: nothing may iterate."""
        self._lists = lists


def sampler_of(loader: DataLoader[Any]) -> ShareSampler:
    """Return the batch sampler of a loader.

    Raises:
        ValueError: it is not one of ``engine.sampler``, or of another dataset; the
            loader gives batches in another order than it was told.
    """
    sampler = loader.batch_sampler
    if not isinstance(sampler, ShareSampler):
        own = type(sampler) not in (BatchSampler, type(None))
        found = type(sampler if own else loader.sampler).__name__
        raise ValueError(
            "batches: expected a DataLoader(dataset, batch_sampler=engine.sampler("
            "dataset, batch_size), ...), which replicas can divide, got one with "
            f"{found}; or give engine.batches the dataset itself. Both take weights=..."
            ", by which samples are drawn"
        )
    size = len(loader.dataset)  # type: ignore[arg-type]  # DataLoader wants one, too
    if size != sampler.num_samples:
        raise ValueError(
            f"batches: expected a sampler of the {size} samples of the loader's "
            f"dataset, got one of {sampler.num_samples}"
        )
    if not loader.in_order:
        raise ValueError(
            "batches: expected a DataLoader(in_order=True), whose batches are those "
            "of the sampler in their order, got in_order=False"
        )
    return sampler


def own_batches(
    loader: DataLoader[Any], sampler: ElasticSampler, division: Division
) -> Generator[Batch, None, None]:
    """Load the batches of the sampler's next pass through a loader.

    Args:
        loader: With a batch sampler of ``engine.sampler``.
        sampler: Names this replica's samples, and where to begin.
        division: Divides what the loader has collated.

    Yields:
        One batch per global batch; empty shares are made without the loader.
    """
    own, lists, first = sampler_of(loader), list(sampler), sampler.position
    shares = Shares(
        cast(MapDataset, loader.dataset),
        loader.collate_fn,
        division,
        sampler.seed,
        sampler.epoch,
        lazy=False,
    )
    own.set_lists([ids for ids in lists if ids])
    loaded = iter(loader)
    try:
        for index, ids in enumerate(lists, first):
            share = shares.taken(ids, next(loaded)) if ids else shares.load(ids)
            yield shares.batch(share, sampler.global_rows(index), index)
    finally:
        own.set_lists(None)


def repeated_batches(
    loader: DataLoader[Any], sampler: ElasticSampler, division: Division, views: int
) -> Generator[Batch, None, None]:
    """Load the batches of the sampler's next pass as a loader would, with views.

    A loader draws for each batch anew. So its dataset, ``collate_fn`` and settings are
    taken, and processes of the engine's own load, which are seeded for each sample.

    Args:
        loader: With a batch sampler of ``engine.sampler``.
        sampler: Names this replica's samples, and where to begin.
        division: Divides what is collated.
        views: After that many epochs the same draws come again.

    Raises:
        ValueError: a loader of another class, which may do more than load.
    """
    if type(loader) is not DataLoader:
        raise ValueError(
            "CacheConfig.views: expected a torch.utils.data.DataLoader, whose settings "
            f"are taken, got {type(loader).__name__}"
        )
    return batches(
        cast(MapDataset, loader.dataset),
        sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        division=division,
        views=views,
        loader_options={
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
        },
    )
