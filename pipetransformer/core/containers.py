"""Tuples, lists and named tuples with other contents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def refilled(container: tuple[Any, ...] | list[Any], items: Iterable[Any]) -> Any:
    """Return items in a container of the same type, named tuples included."""
    kind: Any = type(container)
    return kind(*items) if hasattr(container, "_fields") else kind(items)
