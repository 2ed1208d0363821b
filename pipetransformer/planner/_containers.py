"""What the containers among the attributes of modules hold, kept and put back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

# Of exactly these types: others may be changed by their own methods alone.
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_KINDS = (list, set, deque, *_MAPPINGS)
# What every module has; a layer's parameters, buffers and layers among it.
_OF_MODULES = frozenset(vars(nn.Module()))


class Containers:
    """Contents of lists, dicts, sets and deques, also of those within others.

    What they hold is kept and not copied: tensors stay the same ones.

    Args:
        attributes: Of each module.
    """

    def __init__(self, attributes: Iterable[Mapping[str, Any]]) -> None:
        self._kept: dict[int, tuple[Any, list[Any]]] = {}
        for each in attributes:
            for name, value in each.items():
                if name not in _OF_MODULES:
                    self._keep(value)

    def _keep(self, value: Any) -> None:
        kind = type(value)
        if kind is tuple:
            for part in value:
                self._keep(part)
        elif kind in _KINDS and id(value) not in self._kept:
            held = list(value.items() if kind in _MAPPINGS else value)
            self._kept[id(value)] = value, held  # held, so that the id stays its own
            for part in value.values() if kind in _MAPPINGS else held:
                self._keep(part)

    def put_back(self) -> None:
        """Let each hold again what it held; it is the same object."""
        for container, held in self._kept.values():
            if type(container) is list:
                container[:] = held
                continue
            container.clear()
            if type(container) is deque:
                container.extend(held)
            else:
                container.update(dict(held) if type(container) is Counter else held)
