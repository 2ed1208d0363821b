"""What a skippable layer's ``forward`` yields."""

from __future__ import annotations

import torch


class stash:  # noqa: N801 - used like a statement
    """``yield stash(name, tensor)`` keeps a tensor for a later layer.

    Args:
        name: One of the names that the class declares for stash.
        tensor: Tensor of any shape and dtype, or None.

    Raises:
        TypeError: if the value is neither a tensor nor None.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"stash {name!r}: expected a tensor or None, got "
                f"{type(tensor).__name__}"
            )
        self.name = name
        self.tensor = tensor


class pop:  # noqa: N801 - used like an expression
    """``x = yield pop(name)`` takes what an earlier layer stashed.

    Args:
        name: One of the names that the class declares for pop.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
