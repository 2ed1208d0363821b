"""Loads the batches that a sampler names, and their inputs only when touched."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from pipetransformer.data.division import Division
from pipetransformer.data.sampler import ElasticSampler, seed_of
from pipetransformer.data.seeding import (
    generators_kept,
    in_loader_process,
    seed_generators,
)
from pipetransformer.data.structures import Tree, checked_rows, no_rows, stack_rows

__all__ = [
    "Batch",
    "Collate",
    "ElasticSampler",
    "MapDataset",
    "Tree",
    "batches",
    "check_dataset",
]

Collate: TypeAlias = Callable[[list[object]], object]

_T = TypeVar("_T")

_HALVES = ("inputs", "targets")


class MapDataset(Protocol):
    """A dataset with a length and samples by index.

    A sample is ``(inputs, targets)``, or a mapping of both by name.

    Optional methods: ``__getitems__(indices)`` gives a list of samples, as torch's
    loaders ask for them; loader processes, which are seeded for each sample, and views
    do without. ``inputs(index)`` and ``targets(index)`` load one half of a sample.
    ``input_key(index, epoch) -> int`` names the content of the inputs: one key is of
    one content, in all training sets of a run and of those that share a
    `CacheConfig.directory`. With views (`batches`) the epoch that it is given is the
    number of the view.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """One replica's share of a global batch.

    Attributes:
        ids: sample ids, ``(rows,)`` int64 on the CPU; empty for an empty share.
        targets: collated targets; the first dim of each tensor is ``rows``.
        global_rows: rows of the whole batch over all replicas of all nodes.
        index: number of the batch in the pass, from 0.
        load_inputs: returns the collated inputs; called at most once.
        input_keys: ``(rows,)`` int64 from the dataset's ``input_key``, if it has one.
        lazy: the dataset loads the inputs on their own, and only when touched.
        view: number of the view that the samples were drawn in; 0 without views.
    """

    ids: Tensor
    targets: Tree
    global_rows: int
    index: int
    load_inputs: Callable[[], Tree]
    input_keys: Tensor | None = None
    lazy: bool = False
    view: int = 0

    def __iter__(self) -> NoReturn:
        """Refuse ``for x, y in engine.batches(...)``.

        Raises:
            TypeError: always; it says what to write.
        """
        raise TypeError(
            "batch: expected engine.step(batch), got an iteration over it, as in 'for "
            "x, y in engine.batches(...)'; its halves are batch.inputs and "
            "batch.targets"
        )

    @property
    def rows(self) -> int:
        """Number of samples in this share."""
        return self.ids.shape[0]  # asked for often: less than `len`

    @functools.cached_property
    def inputs(self) -> Tree:
        """Collated inputs, loaded when first touched.

        Raises:
            ValueError: if a tensor's rows are not the batch's.
        """
        return checked_rows(self.load_inputs(), self.rows)


def batches(
    dataset: MapDataset,
    sampler: ElasticSampler,
    *,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    division: Division | None = None,
    views: int | None = None,
    loader_options: Mapping[str, Any] | None = None,
) -> Generator[Batch, None, None]:
    """Load the batches of the sampler's next pass.

    Inputs are loaded when ``batch.inputs`` is touched, in this process, if the dataset
    has ``inputs``, ``targets`` and ``input_key``, and there is no `collate_fn`.

    Args:
        dataset: map-style.
        sampler: names the samples of each batch, for as many as the dataset has.
        collate_fn: list of samples to ``(inputs, targets)`` or to a mapping that
            `division` divides; default torch's.
        num_workers: processes that load ahead; 0 loads in this one. Their global
            generators are seeded for each sample, from the sampler's seed and epoch and
            the sample's id; this process's are left alone, see `views`.
        pin_memory: copy the loaded tensors into page-locked memory.
        division: divides what is collated; default: that for a plain Sequential.
        views: samples are drawn as in epoch ``epoch % views``, so that the same ones
            come again. This process's generators are seeded for them, too, while it
            loads, and put back.
        loader_options: more arguments of the ``DataLoader`` whose processes load.

    Yields:
        One batch per global batch. An empty share has inputs and targets of zero rows
        and the usual trailing shapes.

    Raises:
        TypeError: if the dataset is iterable or has no length, or if a collated batch
            is neither a pair nor a mapping.
        ValueError: if sampler and dataset differ in length, or if a mapping has no
            targets.
    """
    check_dataset(dataset)
    if len(dataset) != sampler.num_samples:
        raise ValueError(
            f"sampler: expected the {len(dataset)} samples of the dataset, got "
            f"{sampler.num_samples}"
        )
    halves = all(callable(getattr(dataset, name, None)) for name in _HALVES)
    return _load(
        Shares(
            dataset,
            collate_fn or stack_rows,
            division or Division(),
            sampler.seed,
            sampler.epoch,
            lazy=halves and hasattr(dataset, "input_key") and collate_fn is None,
            views=views,
        ),
        sampler.shares(),
        [sampler.global_rows(b) for b in range(sampler.position, sampler.num_batches)],
        sampler.position,
        num_workers=num_workers,
        pin_memory=pin_memory,
        options=loader_options or {},
    )


class _Collated(Dataset[object]):
    """What `collate` makes of lists of ids, however it is divided."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def __getitems__(self, ids: list[int]) -> object:
        return self._shares.collated(ids)


def collated_batches(
    dataset: MapDataset,
    lists: Sequence[Sequence[int]],
    *,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    seed: int = 0,
) -> Generator[object, None, None]:
    """Load batches of given samples.

    Args:
        dataset: map-style.
        lists: ids of each batch, at least one.
        collate_fn: list of samples to a batch; default torch's.
        num_workers: processes that load ahead, seeded for each sample; 0 loads in this
            one, whose generators nobody seeds.
        seed: of what loader processes draw.

    Yields:
        What `collate_fn` gives, one for each list.
    """
    shares = Shares(
        dataset, collate_fn or stack_rows, Division(), seed, epoch=0, lazy=False
    )
    collated = _Collated(shares)
    taken = (list(ids) for ids in lists)
    loaded: Iterable[object] = map(collated.__getitems__, taken)
    if num_workers > 0:
        loaded = _loader(collated, taken, num_workers, False, {})
    yield from loaded


def check_dataset(dataset: object) -> None:
    """Raise TypeError unless `dataset` is map-style and has a length."""
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset: expected a map-style dataset, got a DataLoader; pass its "
            "dataset, and collate_fn=loader.collate_fn"
        )
    iterable = isinstance(dataset, IterableDataset)
    if iterable or not all(
        hasattr(dataset, name) for name in ("__len__", "__getitem__")
    ):
        raise TypeError(
            "dataset: expected a map-style dataset with __getitem__ and __len__, "
            f"got {'an iterable one, ' if iterable else ''}{type(dataset).__name__}"
        )


def samples_of(
    dataset: MapDataset,
    ids: Iterable[int],
    get: Callable[[int], object] | None = None,
) -> list[object]:
    """Return samples.

    Args:
        dataset: map-style.
        ids: of the samples.
        get: what gives one, or a half of it. None: the dataset, which may give several
            at once (``__getitems__``).

    Raises:
        RuntimeError: a StopIteration, which would end the pass in silence.
        TypeError: ``__getitems__`` gives a mapping.
        ValueError: it gives another number of samples.
    """
    several = _getter_of_several(dataset) if get is None else None
    get = dataset.__getitem__ if get is None else get
    samples: list[object] = []
    index, listed = 0, list(ids)
    try:
        if several is not None:
            index, found = listed[0], several(listed)
            if isinstance(found, Mapping):
                raise TypeError(
                    f"{type(dataset).__name__}.__getitems__: expected a list of "
                    f"samples, got {type(found).__name__}"
                )
            samples = list(found)
        else:
            for index in listed:  # noqa: B007 - the one that fails is named
                samples.append(get(index))
    except StopIteration as error:
        raise RuntimeError(
            f"{type(dataset).__name__}: expected sample {index}, got StopIteration"
        ) from error
    if len(samples) != len(listed):
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__: expected {len(listed)} samples, "
            f"got {len(samples)}"
        )
    return samples


def _getter_of_several(dataset: Any) -> Callable[[list[int]], Any] | None:
    """Return a dataset's ``__getitems__``, if it gives what ``__getitem__`` does.

    That of a base class does not know what a class that derives has made of a sample,
    nor does that of a ``Subset`` of such a one.
    """
    if isinstance(dataset, Subset) and _getter_of_several(dataset.dataset) is None:
        return None
    for kind in type(dataset).__mro__:
        if vars(kind).get("__getitems__") is not None:
            several: Callable[[list[int]], Any] = dataset.__getitems__
            return several
        if "__getitem__" in vars(kind):
            return None
    return None


class _Share(NamedTuple):
    """What a loader process makes of one list of ids; the loader can pin it."""

    ids: Tensor
    inputs: Tree | None
    targets: Tree
    input_keys: Tensor | None


class Shares(Dataset[_Share]):
    """Loads a list of ids at once, so that an empty list is a batch, too.

    Args:
        dataset: map-style.
        collate: list of samples to what `division` divides.
        division: divides what is collated.
        seed: of what loader processes draw.
        epoch: of the pass.
        lazy: leave out inputs, which the dataset loads on their own.
        views: after that many epochs the same draws come again; None: never.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate: Collate,
        division: Division,
        seed: int,
        epoch: int,
        *,
        lazy: bool,
        views: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.division = division
        self.seed = seed
        self.view = None if views is None else epoch % views
        self.epoch = epoch if self.view is None else self.view
        self.lazy = lazy
        self.input_key = getattr(dataset, "input_key", None)

    def __getitem__(self, index: int) -> _Share:
        return self.load([index])

    def __getitems__(self, ids: list[int]) -> _Share:
        return self.load(ids)

    def load(self, ids: list[int] | Tensor) -> _Share:
        """Load the samples `ids`; without any: zero rows of the usual shapes."""
        listed = ids.tolist() if isinstance(ids, Tensor) else ids
        if self.lazy:
            return self._share(ids, listed, None, self.half("targets", listed))
        pair = self.division.pair(self.collated(listed))
        halves = pair if listed else map(no_rows, pair)
        return self._share(ids, listed, *halves)

    def taken(self, ids: list[int], collated: object) -> _Share:
        """Return the share of the samples `ids`, which were collated elsewhere."""
        return self._share(ids, ids, *self.division.pair(collated))

    def batch(self, share: _Share, global_rows: int, index: int) -> Batch:
        """Return a share as a batch of a pass."""
        return Batch(
            ids=share.ids,
            targets=share.targets,
            global_rows=global_rows,
            index=index,
            load_inputs=functools.partial(_inputs_of, share, self),
            input_keys=share.input_keys,
            lazy=share.inputs is None,
            view=self.view or 0,
        )

    def _share(
        self,
        ids: list[int] | Tensor,
        listed: list[int],
        inputs: Tree | None,
        targets: Tree,
    ) -> _Share:
        keys = None
        if self.input_key is not None:
            keys = _keys([self.input_key(i, self.epoch) for i in listed])
        return _Share(torch.as_tensor(ids, dtype=torch.int64), inputs, targets, keys)

    def half(self, name: str, ids: list[int]) -> Tree:
        tree = cast(Tree, self.collated(ids, getattr(self.dataset, name)))
        half = self.division.half(name, tree)
        return half if ids else no_rows(half)

    def collated(
        self, ids: list[int], get: Callable[[int], object] | None = None
    ) -> object:
        """Collate samples; without any, of which shapes stay open, the first one."""
        taken = ids or [0]
        in_loader = in_loader_process()
        if self.view is None and not in_loader:  # nobody seeds the caller's generators
            return self._collate(samples_of(self.dataset, taken, get))
        with contextlib.nullcontext() if in_loader else generators_kept():
            get = self.dataset.__getitem__ if get is None else get
            samples = samples_of(
                self.dataset, taken, functools.partial(self._seeded, get)
            )
            seed_generators("collate", self.seed, self.epoch, *ids[:1])
            return self._collate(samples)

    def _seeded(self, get: Callable[[int], object], index: int) -> object:
        seed_generators("sample", self.seed, self.epoch, index)
        return get(index)

    def _collate(self, samples: list[object]) -> object:
        try:
            return self.collate(samples)
        except StopIteration as error:  # it would end the pass
            raise RuntimeError(
                f"collate_fn: expected a batch of {len(samples)} samples, got "
                "StopIteration"
            ) from error


def _load(
    shares: Shares,
    ids: Sequence[Tensor],
    sizes: Sequence[int],
    first: int,
    *,
    num_workers: int,
    pin_memory: bool,
    options: Mapping[str, Any],
) -> Generator[Batch, None, None]:
    loaded: Iterable[_Share] = map(shares.load, ids)
    if num_workers > 0 or pin_memory:
        lists = (each.tolist() for each in ids)
        loaded = _loader(shares, lists, num_workers, pin_memory, options, shares.epoch)
    for index, (share, rows) in enumerate(zip(loaded, sizes, strict=True), first):
        yield shares.batch(share, rows, index)


def _loader(
    dataset: Dataset[_T],
    lists: Iterator[list[int]],
    num_workers: int,
    pin_memory: bool,
    options: Mapping[str, Any],
    epoch: int = 0,
) -> Iterator[_T]:
    """Load by a loader of torch.

    Raises:
        RuntimeError: a loader process was lost; as torch says it, or here where its
            pipe was noticed first.
    """
    loader: DataLoader[_T] = DataLoader(
        dataset,
        batch_sampler=lists,
        collate_fn=_unchanged,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # Without a generator of its own the loader draws from the global one.
        generator=torch.Generator().manual_seed(seed_of("loader", epoch)),
        **options,
    )
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        if "in DataLoader worker process" in str(error):
            raise  # what the dataset raised there
        raise RuntimeError(
            f"loader processes: expected all {num_workers} to live, got one that "
            f"exited or was killed ({type(error).__name__})"
        ) from error


def _inputs_of(share: _Share, shares: Shares) -> Tree:
    if share.inputs is None:
        return shares.half("inputs", share.ids.tolist())
    return share.inputs


def _unchanged(share: object) -> object:
    return share  # a collate function must be picklable, which a lambda is not


def _keys(keys: list[object]) -> Tensor:
    if set(map(type, keys)) <= {int}:
        with contextlib.suppress(ValueError, RuntimeError):  # beyond 63 bits
            return torch.tensor(keys, dtype=torch.int64)
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64)


def _signed(key: Any) -> int:
    try:
        number = operator.index(key)
    except TypeError:
        raise TypeError(f"input_key: expected an int, got {key!r}") from None
    return (number + 2**63) % 2**64 - 2**63
