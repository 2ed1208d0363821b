"""What the user says of batches -> how they are loaded, and what plans are made for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from pipetransformer.config.checks import check_count
from pipetransformer.data.loading import ElasticSampler, check_dataset
from pipetransformer.data.own_loader import sampler_of
from pipetransformer.data.sampler import checked_weights
from pipetransformer.data.seeding import generators_kept
from pipetransformer.data.structures import stack_rows, tensors_of
from pipetransformer.data.typical import typical_rows
from pipetransformer.planner import least_rows
from pipetransformer.progress.sharding import Loading
from pipetransformer.run.arguments import EngineArguments, Workload
from pipetransformer.run.context import Run


def loading_of(
    arguments: EngineArguments,
    data: Any,
    batch_size: int | None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int = 0,
    pin_memory: bool = False,
    drop_last: bool,
    weights: Any = None,
) -> Loading:
    """Check what `engine.batches` and `engine.prepare` are given.

    Raises:
        TypeError: an iterable dataset or one without a length; a dataset without a
            batch size; a loader, and besides it what the loader has itself.
        ValueError: no sample; a batch size below 1; less than no loader process; a
            loader without a sampler of the engine; weights that are not one for each
            sample.
    """
    loader = data if isinstance(data, DataLoader) else None
    dataset = data if loader is None else loader.dataset
    check_dataset(dataset)
    if len(dataset) == 0:  # type: ignore[arg-type]  # as check_dataset has seen
        raise ValueError("batches: expected at least one sample, got an empty dataset")
    if loader is not None:
        given = {
            "batch_size": batch_size is not None,
            "collate_fn": collate_fn is not None,
            "num_workers": num_workers != 0,
            "pin_memory": pin_memory,
            "drop_last": drop_last,
            "weights": weights is not None,
        }
        named = ", ".join(name for name, is_there in given.items() if is_there)
        if named:
            raise TypeError(
                f"batches: expected a DataLoader alone, got {named} with it"
            )
        sampler = sampler_of(loader)
        batch_size, drop_last = sampler.global_batch, sampler.drops_last
        collate_fn, weights = loader.collate_fn, sampler.weights
    elif batch_size is None:
        raise TypeError("batch_size: expected an int, got None")
    if weights is not None:
        weights = checked_weights(weights, len(dataset))  # type: ignore[arg-type]
    return Loading(
        dataset,
        check_count("batch_size", batch_size),
        collate_fn=collate_fn,
        num_workers=check_count("num_workers", num_workers, least=0),
        pin_memory=pin_memory,
        drop_last=drop_last,
        min_rows=least_rows(arguments.model),
        division=arguments.division,
        loader=loader,
        views=arguments.config.cache.views,
        weights=weights,
    )


def workload_of(run: Run, loading: Loading) -> Workload:
    """Return what plans are made for.

    Raises:
        ValueError: no sample, or less than a batch where a short one is left out.
    """
    dataset, size = loading.dataset, len(loading.dataset)
    whole = ElasticSampler(
        size,
        loading.batch_size,
        seed=run.config.seed,
        num_nodes=run.info.num_nodes,
        node=None,
        drop_last=loading.drop_last,
        weights=loading.weights,
    )
    if len(whole) == 0:
        raise ValueError(
            f"batch_size: expected at most the {size} samples of the dataset with "
            f"drop_last=True, got {loading.batch_size}; nothing would be trained"
        )

    def sample(rows: int) -> Any:
        # With views the generators of the program are not drawn from.
        apart = loading.views is not None
        with generators_kept() if apart else contextlib.nullcontext():
            inputs = typical_rows(
                dataset,
                whole,
                rows,
                collate=loading.collate_fn or stack_rows,
                inputs_of=lambda batch: loading.division.pair(batch)[0],
            )
        ragged = run.arguments.ragged
        if ragged is not None:  # a wrong one is to be an error here
            ragged.rows_of(inputs, tensors_of(inputs))
        return inputs

    return Workload(
        size,
        loading.batch_size,
        len(whole),
        loading.drop_last,
        sample,
        hashes=not hasattr(dataset, "input_key"),
        weights=loading.weights_hash,
    )
