"""Tuples, lists, named tuples and mappings with other contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def refilled(container: tuple[Any, ...] | list[Any], items: Iterable[Any]) -> Any:
    """Return items in a container of the same type, named tuples included."""
    kind: Any = type(container)
    return kind(*items) if hasattr(container, "_fields") else kind(items)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what tuples, lists and mappings hold at any depth, in order."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        yield tree
        return
    for part in tree:
        yield from leaves(part)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the structure with `change` applied to its tensors, in order.

    Containers in which nothing changes are the same objects; other mappings become
    dicts.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        parts = {key: map_tensors(part, change) for key, part in tree.items()}
        same = all(parts[key] is part for key, part in tree.items())
        return tree if same else parts
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(part, change) for part in tree]
        if all(one is other for one, other in zip(items, tree, strict=True)):
            return tree
        return refilled(tree, items)
    return tree
