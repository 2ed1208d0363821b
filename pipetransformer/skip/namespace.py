"""Names of skip tensors kept apart from equal names elsewhere."""

from __future__ import annotations

import abc
import functools
import uuid


@functools.total_ordering
class Namespace(metaclass=abc.ABCMeta):  # noqa: B024 - only to claim None
    """Keeps skip names of one part of a model apart from those of another.

    Every new namespace is different from all others; a copy, also one that went
    through pickle, equals its original. Namespaces are hashable and totally ordered.
    None is the default namespace and counts as an instance; it comes first.

    Example:
        >>> for block in blocks:
        ...     ns = Namespace()
        ...     layers += [Encode().isolate(ns), Decode().isolate(ns)]
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self._id}'>"

    def __hash__(self) -> int:
        return hash(self._id)

    # None is an instance too, so it is told apart before the others are.
    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        return self._id == other._id if isinstance(other, Namespace) else NotImplemented

    def __lt__(self, other: object) -> bool:
        if other is None:
            return False
        return self._id < other._id if isinstance(other, Namespace) else NotImplemented


Namespace.register(type(None))
