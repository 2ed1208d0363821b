"""Counts which layers really ran, so that a run's bound is its own and not assumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pipetransformer.data.structures import tensors_of

# Cost of a row's pass through a layer; a trained one's backward costs 2.
COSTS = {"trained": 3, "forward": 1, "evaluated": 1}
TRAINING = ("trained", "forward")


class LayerCounter:
    """Counts the rows that pass through each layer: trained, forward only, evaluated.

    A forward whose output carries a graph is counted as trained: its backward
    follows. Appending to a list is atomic, so workers may count at the same time.

    Args:
        layers: The layers to watch; a forward hook is put on each.
        last: A layer that never freezes: an evaluation runs while it is in evaluation
            mode. Frozen layers may be so in training, too.
    """

    def __init__(self, layers: Iterable[nn.Module], last: nn.Module) -> None:
        self._seen: list[tuple[str, int]] = []
        self._last = last
        for layer in layers:
            layer.register_forward_hook(self._count)

    def _count(self, layer: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        tracked = any(tensor.requires_grad for tensor in tensors_of(out))
        kind = "trained" if torch.is_grad_enabled() and tracked else "forward"
        rows = len(tensors_of(inputs)[0])
        self._seen.append((kind if self._last.training else "evaluated", rows))

    def reset(self) -> None:
        """Count from here."""
        self._seen.clear()

    def rows(self) -> dict[str, int]:
        """Return rows times layers of each kind in `COSTS`."""
        found = dict.fromkeys(COSTS, 0)
        for kind, rows in self._seen:
            found[kind] += rows
        return found


def work_of(
    rows: Iterable[Mapping[str, int]], kinds: Iterable[str] = tuple(COSTS)
) -> int:
    """Return the work of all ranks in forwards of one layer for one row."""
    wanted = tuple(kinds)
    return sum(COSTS[kind] * part[kind] for part in rows for kind in wanted)
