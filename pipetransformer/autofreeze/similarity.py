"""How far the activations of a batch have come from what they were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def similarities(activations: Tensor) -> Tensor:
    """Return how alike the samples of a batch are, by their activations.

    Args:
        activations: ``(rows, ...)``, floating point.

    Returns:
        ``(rows, rows)`` float64 on the host: the products of the samples with each
        other, each row divided by its L2 norm. Scaling the activations changes
        nothing; a sample without any gives zeros.
    """
    flat = activations.detach().flatten(1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    with torch.autocast(flat.device.type, enabled=False):
        products = (flat @ flat.T).to("cpu", torch.float64)
    norms = products.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, products / norms, torch.zeros_like(products))


def plasticity_of(now: Tensor, before: Tensor) -> float:
    """Return the mean squared difference of two results of `similarities`.

    0 for equal ones, at most ``4 / rows``.

    Source: Egeria (Wang et al., EuroSys 2023), section 4.1.
    """
    return float((now - before).square().mean())


class ActivationChange:
    """The plasticity of each unit since the evaluation point before.

    Of the point before only similarities are kept, ``(rows, rows)`` for each unit. Each
    replica compares its own; before a decision they exchange what they found, so that
    all of them decide by the same numbers. Not thread-safe.
    """

    def __init__(self) -> None:
        self._point = -1  # that was measured last
        self._before: list[Tensor] = []
        self._own: list[float] | None = None
        self._mean: list[float] | None = None

    def measure(self, point: int, activations: Iterable[Tensor]) -> None:
        """Take in what each unit gives for the batch, which is always the same.

        Args:
            point: Number of the evaluation point; one that was measured already, as
                before a failure, is left as it is. Only with the one right before are
                they compared.
            activations: Of each unit, ``(rows, ...)``; asked for if they are needed.
        """
        last, self._point = self._point, point
        if last == point:
            return
        before, self._before = self._before, [similarities(a) for a in activations]
        self._own = None
        if before and last == point - 1:
            pairs = zip(self._before, before, strict=True)
            self._own = [plasticity_of(now, then) for now, then in pairs]

    @property
    def own(self) -> list[float] | None:
        """What this replica found; None: it had nothing to compare with."""
        return self._own

    def settle(self, parts: Iterable[Sequence[float] | None]) -> list[float] | None:
        """Take in `own` of every replica, in the same order on all; return the mean.

        Those that have joined since the point before found nothing.
        """
        told = [part for part in parts if part is not None]
        columns = zip(*told, strict=True)
        self.know([math.fsum(c) / len(c) for c in columns] if told else None)
        return self._mean

    def know(self, mean: Sequence[float] | None) -> None:
        """Take over the mean from a rank that has settled it."""
        self._mean = None if mean is None else list(mean)

    def take(self) -> tuple[float, ...] | None:
        """Return the mean over all replicas, once; None: nobody knows it."""
        mean, self._mean = self._mean, None
        return None if mean is None else tuple(mean)
