"""What layers of encoders need besides `parts`: masks within, and tables that all read.

A table is a trained value that every block reads, such as an embedding of distances. A
layer may share nothing with another one, so the first layer owns it and hands it on:
what travels is the hidden states, the padding mask and the table, which has no rows and
is the same for all micro-batches. Its gradient comes back the same way. It is frozen
when the first layer is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.parts import Attention, Block, Embed

TEXT_TASKS = (
    "sequence-classification",
    "token-classification",
    "question-answering",
    "masked-lm",
    "multiple-choice",
)


def all_but(*names: str) -> tuple[str, ...]:
    """Return the tasks of a family that has no model for some of them."""
    return tuple(task for task in TEXT_TASKS if task not in names)


class MaskedEmbed(Embed):
    """A first layer whose embeddings are zero at padding: `call` takes the mask, last.

    It is bool, ``(rows, length)``, True at tokens.
    """

    def forward(self, *tensors: Tensor) -> Any:
        """Embed a batch."""
        ordered = [t for k, t in enumerate(tensors) if k != self._mask]
        there = next(t for k, t in enumerate(tensors) if k == self._mask).bool()
        return self._call(self, *ordered, there), there.view_as(there)


class TableEmbed(Embed):
    """A first layer that owns a table and hands it on.

    Args:
        first: The layer without the table.
        parts: Submodules of the model that `table` uses, by name.
        table: Takes the layer; returns the table, or None where the model has none.
    """

    first: Embed

    def __init__(
        self,
        first: Embed,
        parts: dict[str, nn.Module],
        table: Callable[[Any], Tensor | None],
    ) -> None:
        super().__init__({"first": first, **parts}, first._call, first._mask)
        self._table = table

    def forward(self, *tensors: Tensor) -> Any:
        """Return hidden states, padding mask and table."""
        hidden, padding = self.first(*tensors)
        return hidden, padding, self._table(self)


class TableBlock(Block):
    """A layer behind a `TableEmbed`; `call` takes the table as well, last."""

    def forward(
        self, hidden: Tensor, padding: Tensor | None = None, table: Any = None
    ) -> Any:
        """Run the block; padding mask and table are handed on as they are."""
        make, mask = self.attention_mask, None
        if make is not None and padding is not None:
            mask = make.mask(hidden, padding)
        return self._call(self, hidden, mask, table), padding, table


class Windowed(Attention):
    """Gives the mask of blocks that see ``config.sliding_window`` tokens each way."""

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        """Make what `mask` returns."""
        from transformers import masking_utils

        make = masking_utils.create_bidirectional_sliding_window_mask
        given = {"config": self.config, "inputs_embeds": hidden, **more}
        return make(attention_mask=there, **given)
