"""Counts which layers really ran, so that a run's bound is its own and not assumed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

TRAINED_COST = 3  # forward 1, backward 2
FORWARD_COST = 1


class LayerCounter:
    """Counts the rows that pass through each layer, trained and forward only.

    A forward whose output carries a graph is counted as trained: its backward
    follows. Appending to a list is atomic, so workers may count at the same time.

    Args:
        layers: The layers to watch; a forward hook is put on each.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._seen: list[tuple[bool, int]] = []
        for layer in layers:
            layer.register_forward_hook(self._count)

    def _count(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        trained = torch.is_grad_enabled() and out.requires_grad
        self._seen.append((trained, len(inputs[0])))

    def reset(self) -> None:
        """Count from here."""
        self._seen.clear()

    def rows(self) -> dict[str, int]:
        """Return rows times layers: ``{"trained": ..., "forward": ...}``."""
        trained = sum(rows for is_trained, rows in self._seen if is_trained)
        return {
            "trained": trained,
            "forward": sum(rows for _, rows in self._seen) - trained,
        }


def work_of(rows: Iterable[dict[str, int]]) -> int:
    """Return the work of all ranks in forwards of one layer for one row."""
    return sum(
        TRAINED_COST * part["trained"] + FORWARD_COST * part["forward"] for part in rows
    )
