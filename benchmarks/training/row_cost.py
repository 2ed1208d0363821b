"""What a row costs in micro-batches of different sizes: smaller ones are slower."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import nn

REPEATS = 8


def row_seconds(
    model: nn.Sequential,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    sizes: Iterable[int],
) -> dict[int, float]:
    """Return the least CPU seconds of one row's forward and backward, by size.

    One thread. The sizes take turns; whatever disturbs a turn only makes it longer.

    Args:
        model: What is trained; its gradients are gone afterwards.
        inputs: ``(rows, ...)``, as many rows as the largest size or more.
        targets: ``(rows,)``, classes.
        sizes: Rows of a micro-batch.
    """
    least: dict[int, float] = {}
    for repeat in range(REPEATS + 1):
        for size in sorted(set(sizes)):
            start = time.process_time()
            loss = nn.functional.cross_entropy(model(inputs[:size]), targets[:size])
            loss.backward()  # type: ignore[no-untyped-call]
            seconds = (time.process_time() - start) / size
            model.zero_grad(set_to_none=True)
            if repeat:  # the first one warms up
                least[size] = min(seconds, least.get(size, seconds))
    return least
