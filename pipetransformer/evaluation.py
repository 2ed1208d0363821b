"""Exact evaluation: every sample once, in micro-batches that no plan changes.

A row's bits may depend on the shape it is computed in, so the dataset is cut into
micro-batches of a fixed number of rows; the loss is one call on the gathered outputs.
Hence loss and metrics are bitwise equal under every plan of the same weights.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipetransformer.autocache import ActivationCache
from pipetransformer.prefix import tensors_of
from pipetransformer.run import Run
from pipetransformer.transformation import Replica

Metric = Callable[[Any, Any], Tensor]


def arguments_of(value: Any) -> tuple[Any, ...] | Mapping[str, Any]:
    """Return the arguments of the first layer: a mapping holds keywords."""
    if isinstance(value, Mapping):
        return value
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def join(pieces: Sequence[Any]) -> Any:
    """Concatenate equal structures of tensors on dim 0."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(list(pieces))
    if isinstance(first, Mapping):
        return {key: join([piece[key] for piece in pieces]) for key in first}
    return tuple(join(list(column)) for column in zip(*pieces, strict=True))


def _same(value: Any) -> Any:
    return value


def forward_share(
    run: Run,
    replica: Replica,
    dataset: Any,
    *,
    cache: ActivationCache | None,
    collate: Callable[[list[Any]], Any],
) -> list[tuple[Any, Any]]:
    """Run this replica's micro-batches; return (outputs, targets) of each."""
    rows, total = run.config.eval_microbatch_rows, len(dataset)
    starts = list(range(0, total, rows))
    size, index = replica.group.size, replica.group.rank
    share = starts[len(starts) * index // size : len(starts) * (index + 1) // size]
    window = 2 * replica.plan.num_stages
    results: list[tuple[Any, Any]] = []
    for at in range(0, len(share), window):
        run.plane.check()
        ready, wanted = [], []
        for start in share[at : at + window]:
            ids = torch.arange(start, min(start + rows, total))
            inputs, targets = collate([dataset[int(i)] for i in ids])
            if replica.prefix is not None:
                inputs = replica.prefix(partial(_same, inputs), ids, cache, whole=True)
            ready.append(inputs)
            wanted.append(targets)
        outputs = replica.pipe.run([arguments_of(value) for value in ready])
        results.extend(zip(outputs, wanted, strict=True))
    return results


def evaluate(
    run: Run,
    replica: Replica,
    dataset: Any,
    metrics: Mapping[str, Metric],
    *,
    name: str,
    collate: Callable[[list[Any]], Any] | None,
) -> dict[str, float]:
    """Evaluate on the active ranks; collective over the active group.

    Returns:
        ``{"loss": ..., **metrics}``, equal on every active rank.
    """
    if len(dataset) == 0:
        raise ValueError("evaluation set: expected at least one sample, got none")
    if replica.prefix is not None and replica.prefix.refusal is None:
        run.open_cache(name, len(dataset))
    run.freezer.train(False)
    try:
        with run.guarded(), torch.no_grad():
            share = forward_share(
                run,
                replica,
                dataset,
                cache=run.cache(name),
                collate=collate or default_collate,
            )
            gathered = _gather(replica, share)
            outputs = join([pair[0] for pair in gathered])
            targets = join([pair[1] for pair in gathered])
            result = {"loss": float(run.recipe.loss(outputs, targets))}
            for key, metric in metrics.items():
                result[key] = _mean(key, metric(outputs, targets), outputs)
    finally:
        run.freezer.train(True)
    return result


def _gather(replica: Replica, share: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    if replica.group.size == 1:
        return share
    buffer = io.BytesIO()
    torch.save(share, buffer)
    parts = replica.group.all_gather_bytes(buffer.getvalue())
    return [
        pair
        for part in parts
        for pair in torch.load(io.BytesIO(part), weights_only=True)
    ]


def _mean(key: str, values: Tensor, outputs: Any) -> float:
    rows = len(tensors_of(outputs)[0])
    if not isinstance(values, Tensor) or values.shape != (rows,):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values)
        raise ValueError(
            f"metric {key!r}: expected one value per row, shape ({rows},), got {shape}"
        )
    return float(values.double().mean())
