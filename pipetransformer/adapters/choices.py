"""Layers of a model that rates choices: a row holds several texts, one for each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Choices(nn.Module):
    """Runs a layer on texts where rows are given: ``(rows, choices, length, ...)``.

    Rows stay the first dim of what travels between layers, so that micro-batches and
    the activation cache are of samples.

    Args:
        layer: Takes and returns tensors of one row per text.
        tensors: How many of those that it takes are of texts; None: all. Others are
            handed on as they are.
    """

    def __init__(self, layer: nn.Module, tensors: int | None) -> None:
        super().__init__()
        self.layer = layer
        self._tensors = tensors

    def forward(self, *values: Any) -> Any:
        """Run the layer; hidden states and padding mask are of rows again.

        Raises:
            ValueError: the first layer is given something else than rows of choices.
        """
        first: Tensor = values[0]
        if first.dim() < 3:
            raise ValueError(
                "batch: expected tensors (rows, choices, length) for multiple-choice, "
                f"got {tuple(first.shape)}"
            )
        shape = first.shape[:2]
        number = len(values) if self._tensors is None else self._tensors
        flat = [_flat(value) for value in values[:number]]
        hidden, padding, *rest = self.layer(*flat, *values[number:])
        # A layer hands the padding on as it is, with the masks that were made of it.
        same = number > 1 and padding is flat[1]
        rows = values[1] if same else padding.unflatten(0, shape)
        if not same:
            rows.__dict__["_flat"] = padding
        return (hidden.unflatten(0, shape), rows, *rest)


def _flat(value: Tensor) -> Tensor:
    """Return a tensor of texts; of a padding mask that layers share always the same."""
    found = value.__dict__.get("_flat")
    return value.flatten(0, 1) if found is None else found
