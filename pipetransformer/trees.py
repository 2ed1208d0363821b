"""Structures of tensors that a collate function returns, and their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

Tree: TypeAlias = "Tensor | tuple[Tree, ...] | list[Tree] | dict[str, Tree]"
"""What a collate function returns: tensors in tuples, lists and dicts."""

_CONTAINERS = (Tensor, Mapping, tuple, list)


def no_rows(tree: object) -> Tree:
    """Return a collated structure without its rows, trailing shapes kept.

    Raises:
        TypeError: the structure holds something that is no tensor.
    """
    if isinstance(tree, Tensor):
        return tree[:0]
    if isinstance(tree, Mapping):
        return {key: no_rows(value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        # A list of one leaf per sample, such as strings, has no rows either.
        kept = [no_rows(t) for t in tree if isinstance(t, _CONTAINERS)]
        return tuple(kept) if isinstance(tree, tuple) else kept
    raise TypeError(
        f"collate_fn: expected tensors in tuples, lists or dicts, got "
        f"{type(tree).__name__}"
    )


def num_rows(tree: object) -> int | None:
    """Return the rows of the first tensor that has any; None without one."""
    if isinstance(tree, Tensor):
        return len(tree) if tree.dim() else None
    if not isinstance(tree, (Mapping, tuple, list)):
        return None
    values = tree.values() if isinstance(tree, Mapping) else tree
    return next((rows for v in values if (rows := num_rows(v)) is not None), None)
