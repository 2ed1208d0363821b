"""Exact evaluation: every sample once, in micro-batches that no plan changes.

A loss that is a mean (`Config.check_loss`) and metrics by row are taken where the
outputs of a micro-batch are, so these go nowhere: those of a language model are as
large as its vocabulary for each token. Loss and metrics are bitwise equal under every
plan of the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipetransformer.autodp import gather_at
from pipetransformer.core.devices import HOST, to_device
from pipetransformer.data.structures import fit_together, join_rows
from pipetransformer.loop.microbatches import (
    FixedSet,
    evaluating,
    forward_share,
    packed,
    unpacked,
)
from pipetransformer.loop.step import weight_of
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run

Metric = Callable[[Any, Any], Tensor]

# Loss, its weight, values of the metrics by row, and the rows themselves if needed.
_Part: TypeAlias = "tuple[float, float, dict[str, Tensor], tuple[Any, Any] | None]"


def evaluate(
    run: Run,
    replica: Replica,
    samples: FixedSet,
    metrics: Mapping[str, Metric],
) -> dict[str, float]:
    """Evaluate on the active ranks; collective over the active group.

    Returns:
        ``{"loss": ..., **metrics}``, equal on every active rank.
    """
    compares_rows = not run.config.check_loss and run.arguments.loss_weight is None

    def keep(outputs: Any, targets: Any, rows: int) -> _Part:
        whole = to_device((outputs, targets), HOST) if compares_rows else None
        weight = float(weight_of(run, targets, rows))
        loss = 0.0 if compares_rows or not weight else _loss_of(run, outputs, targets)
        values = {
            key: _values(key, metric(outputs, targets), rows)
            for key, metric in metrics.items()
        }
        return loss, weight, values, whole

    with evaluating(run, replica, samples):
        share = forward_share(
            run,
            replica,
            samples,
            divide=run.arguments.division.pair,
            keep=keep,
        )
        parts = _gather(replica, share, len(samples))
        result = {"loss": _of_whole(run, parts) if compares_rows else _mean_loss(parts)}
        for key in metrics:
            values = torch.cat([part[2][key] for part in parts])
            result[key] = float(values.mean())
    return result


def _loss_of(run: Run, outputs: Any, targets: Any) -> float:
    value = run.arguments.loss(outputs, targets)
    if not isinstance(value, (Tensor, float)):
        raise TypeError(
            f"loss: expected a scalar tensor, got {type(value).__name__} in evaluation"
        )
    if isinstance(value, Tensor) and value.dim() != 0:
        raise ValueError(
            f"loss: expected a scalar mean over rows, got shape {tuple(value.shape)}"
        )
    return float(value)


def _loss_there(run: Run, pair: tuple[Any, Any]) -> float:
    """Return the loss of what is on the host, where the last layers are."""
    last = list(run.arguments.model.parameters())[-1]
    return _loss_of(run, *to_device(pair, last.device))


def _gather(replica: Replica, share: list[_Part], samples: int) -> list[_Part]:
    if replica.group.size == 1:
        return share
    call = f"evaluate of {samples} samples"
    parts = gather_at(replica.group, call, packed(share))
    return [part for received in parts for part in unpacked(received)]


def _mean_loss(parts: Sequence[_Part]) -> float:
    """Return the mean of the parts' losses, each weighted by what it is the mean of."""
    total = math.fsum(weight for _, weight, _, _ in parts)
    if not total:
        return math.nan  # nothing in the set counts
    return math.fsum(loss * weight for loss, weight, _, _ in parts) / total


def _of_whole(run: Run, parts: Sequence[_Part]) -> float:
    """Return the loss of all rows at once; by parts where these do not fit together."""
    pairs = [whole for *_, whole in parts if whole is not None]
    if fit_together(pairs):
        return _loss_there(run, join_rows(pairs))
    losses = [_loss_there(run, pair) for pair in pairs]
    return _mean_loss(
        [(loss, part[1], {}, None) for loss, part in zip(losses, parts, strict=True)]
    )


def _values(key: str, values: Tensor, rows: int) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != (rows,):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values)
        raise ValueError(
            f"metric {key!r}: expected one value per row, shape ({rows},), got {shape}"
        )
    return values.double().cpu()
