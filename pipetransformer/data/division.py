"""Divides a collated batch into inputs and targets: a pair, or tensors by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, cast

from pipetransformer.data.structures import Tree

TARGET_NAMES = ("labels", "label", "start_positions", "end_positions", "targets")
"""Entries of a batch of named tensors that are targets, for a plain Sequential."""


class NamedParts(Protocol):
    """Knows which entries of a batch of named tensors its layers take."""

    def inputs(self, batch: Mapping[str, Any], /) -> Any:
        """Return the arguments of the first layer."""

    def targets(self, batch: Mapping[str, Any], /) -> Any:
        """Return the targets."""


@dataclasses.dataclass(frozen=True)
class Division:
    """How the batches of a run are divided.

    Attributes:
        parts: Of an adapted model. None, for a plain Sequential: entries named as in
            `TARGET_NAMES` are targets, all others keywords of the first layer.
    """

    parts: NamedParts | None = None

    def pair(self, batch: object) -> tuple[Tree, Tree]:
        """Return inputs and targets of a collated batch.

        Args:
            batch: ``(inputs, targets)``, or a mapping of tensors. Inputs of a pair may
                be a mapping, too.

        Raises:
            TypeError: it is neither.
            ValueError: a mapping without targets.
        """
        if isinstance(batch, Mapping):
            return self.inputs(batch), self._targets(batch)
        inputs, targets = _pair(batch)
        return self.half("inputs", inputs), targets

    def inputs(self, batch: object) -> Tree:
        """Return the inputs alone; a mapping needs no targets then.

        Raises:
            TypeError: the batch is neither a pair nor a mapping.
        """
        if not isinstance(batch, Mapping):
            wanted = "; without targets let collate_fn return (inputs, None)"
            return self.half("inputs", _pair(batch, wanted)[0])
        if self.parts is not None:
            return cast(Tree, self.parts.inputs(batch))
        return {key: part for key, part in batch.items() if key not in TARGET_NAMES}

    def half(self, name: str, tree: Tree) -> Tree:
        """Return ``inputs`` or ``targets`` that a dataset has loaded alone."""
        if self.parts is None or not isinstance(tree, Mapping):
            return tree
        divide = self.parts.inputs if name == "inputs" else self.parts.targets
        return cast(Tree, divide(tree))

    def _targets(self, batch: Mapping[str, Any]) -> Tree:
        if self.parts is not None:
            return cast(Tree, self.parts.targets(batch))
        found = tuple(batch[name] for name in TARGET_NAMES if name in batch)
        if not found:
            raise ValueError(
                f"batch: expected targets in an entry {', '.join(TARGET_NAMES)}, got "
                f"{', '.join(map(str, batch))}; or let collate_fn return (inputs, "
                "targets)"
            )
        return found[0] if len(found) == 1 else found


def _pair(batch: object, wanted: str = "") -> tuple[Tree, Tree]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            "samples: expected (inputs, targets) pairs, or mappings of named tensors, "
            f"got batches of type {type(batch).__name__}{_count(batch)}{wanted}"
        )
    return batch[0], batch[1]


def _count(batch: object) -> str:
    return f" with {len(batch)} items" if isinstance(batch, (tuple, list)) else ""
