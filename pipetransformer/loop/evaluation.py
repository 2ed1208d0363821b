"""Exact evaluation: every sample once, in micro-batches that no plan changes.

A row's bits may depend on the shape it is computed in, so the dataset is cut into
micro-batches that depend on its length alone; the loss is one call on the gathered
outputs, or, where these differ in more than rows (text padded by micro-batch), one for
each micro-batch. Hence loss and metrics are bitwise equal under every plan of the same
weights.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipetransformer.autocache import ActivationCache
from pipetransformer.data.structures import (
    arguments_of,
    fit_together,
    join_rows,
    rows_of,
)
from pipetransformer.loop.step import weight_of
from pipetransformer.replica.draws import position_of_evaluation
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run

Metric = Callable[[Any, Any], Tensor]


def microbatches(total: int, most_rows: int) -> list[range]:
    """Cut sample ids into the fewest micro-batches of at most `most_rows` rows.

    They are at most one row apart, so that replicas with equally many have equally
    much to do.
    """
    count = -(-total // most_rows)
    ends = [total * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def forward_share(
    run: Run,
    replica: Replica,
    dataset: Any,
    *,
    cache: ActivationCache | None,
    collate: Callable[[list[Any]], Any],
) -> list[tuple[Any, Any]]:
    """Run this replica's micro-batches; return (outputs, targets) of each."""
    cut = microbatches(len(dataset), run.config.eval_microbatch_rows)
    size, index = replica.group.size, replica.group.rank
    begin = len(cut) * index // size
    share = cut[begin : len(cut) * (index + 1) // size]
    prefix, step = replica.prefix, run.state.step

    def load(rows: range) -> tuple[Any, Tensor]:
        return collate([dataset[i] for i in rows]), torch.tensor(rows)

    def through_prefix(numbered: tuple[int, tuple[Any, Tensor]]) -> Any:
        number, ((inputs, _), ids) = numbered
        if prefix is None:
            return inputs
        position = position_of_evaluation(step, number)
        return prefix(lambda: inputs, ids, cache, position=position, whole=True)

    window = 2 * replica.plan.num_stages
    results: list[tuple[Any, Any]] = []
    for at in range(0, len(share), window):
        run.plane.check()
        loaded = [load(rows) for rows in share[at : at + window]]
        first = position_of_evaluation(step, begin + at)
        replica.pipe.set_draw_position(
            step=first.step, first_microbatch=first.first_microbatch
        )
        numbered = list(enumerate(loaded, begin + at))
        ready = replica.workers.map(through_prefix, numbered)
        outputs = replica.pipe.run([arguments_of(value) for value in ready])
        targets = [pair[1] for pair, _ in loaded]
        results.extend(zip(outputs, targets, strict=True))
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
    if name == "train":
        raise ValueError("name: expected another one than the training set's 'train'")
    if replica.prefix is not None:
        replica.prefix.refresh()
        if replica.prefix.refusal is None:
            run.caches.obtain(name, len(dataset), run.in_force.layout)
    run.freezer.train(False)
    try:
        with run.guarded(), torch.no_grad():
            share = forward_share(
                run,
                replica,
                dataset,
                cache=run.caches.of(name, len(dataset)),
                collate=collate or default_collate,
            )
            gathered = _gather(replica, share)
            if fit_together(gathered):
                gathered = [join_rows(gathered)]
            result = {"loss": _mean_loss(run, gathered)}
            for key, metric in metrics.items():
                values = [_values(key, metric(*pair), pair[0]) for pair in gathered]
                result[key] = float(torch.cat(values).mean())
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


def _mean_loss(run: Run, pieces: Sequence[tuple[Any, Any]]) -> float:
    """Return the mean loss of all pieces, each weighted by what it is the mean of."""
    loss = run.arguments.loss
    if len(pieces) == 1:
        return float(loss(*pieces[0]))
    weights = [weight_of(run, piece[1], rows_of(piece[0])) for piece in pieces]
    parts = zip(weights, pieces, strict=True)
    total = math.fsum(w * float(loss(*piece)) for w, piece in parts if w)
    return total / math.fsum(weights)


def _values(key: str, values: Tensor, outputs: Any) -> Tensor:
    rows = rows_of(outputs)
    if not isinstance(values, Tensor) or values.shape != (rows,):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values)
        raise ValueError(
            f"metric {key!r}: expected one value per row, shape ({rows},), got {shape}"
        )
    return values.double()
