"""The loss of a step whose schedule takes it: called for each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipetransformer.data.structures import as_real, rows_of, tensors_of
from pipetransformer.loop.loss_check import judged_loss
from pipetransformer.run.context import Run


class MicrobatchLoss:
    """What a pipeline calls with the outputs and targets of each micro-batch.

    The mean of its values over rows is the loss of all rows, as the user's loss gives
    it for them at once: where that is a mean over something else, such as tokens, each
    micro-batch counts by its share of it. In fp16 values are scaled before their
    backward begins, which the pipeline runs at once.

    Args:
        run: The run.
        targets: Of this replica's rows.
        rows: How many.

    Raises:
        ValueError: targets that cannot be cut into micro-batches.
    """

    def __init__(self, run: Run, targets: Any, rows: int) -> None:
        if not _has_rows(targets, rows):
            raise ValueError(
                f"PipeConfig.schedule: expected targets of tensors with {rows} rows "
                "each, which micro-batches can share, got others; use 'gpipe'"
            )
        self._run, self._rows = run, rows
        count = run.arguments.loss_weight
        self._weight = float(count(targets)) if count is not None else None
        scaler = run.precision.scaler
        self.scale = float(scaler.get_scale()) if scaler is not None else 1.0

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of a micro-batch, ``()``, for the mean over rows."""
        given, share = self._run.arguments, 1.0
        if self._weight is not None and given.loss_weight is not None:
            count = float(given.loss_weight(targets))
            if count == 0:
                return zero_of(outputs)
            share = count * self._rows / (self._weight * rows_of(targets))
        value = judged_loss(self._run, outputs, targets)
        factor = share * self.scale
        return value if factor == 1.0 else value * factor


def zero_of(outputs: Any) -> Tensor:
    """Return a loss of nothing: zero, with gradients of zero."""
    tensors = map(as_real, tensors_of(outputs))
    parts = [t.sum() for t in tensors if t.is_floating_point()]
    return torch.stack(parts).sum() * 0.0


def _has_rows(value: Any, rows: int) -> bool:
    """Tell whether all of a structure is tensors with that many rows."""
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == rows
    if isinstance(value, Mapping):
        return all(_has_rows(part, rows) for part in value.values())
    if isinstance(value, (tuple, list)):
        return all(_has_rows(part, rows) for part in value)
    return value is None
