"""Objects of the user's script whose state goes where the training state goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipetransformer.state.message import stranger, with_numbers

_METHODS = ("state_dict", "load_state_dict")


class Registered:
    """The objects by name.

    The state of each is a tree of dicts, lists, tuples, tensors and plain values.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._held: dict[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """What is registered, sorted."""
        return sorted(self._objects)

    def add(self, name: str, registered: object) -> None:
        """Take an object.

        Raises:
            TypeError: a name that is no text; an object without the two methods, or
                whose state holds more than tensors and plain values.
            ValueError: a name that is empty or taken.
        """
        if not isinstance(name, str):
            raise TypeError(f"register: expected a name of type str, got {name!r}")
        if not name or name in self._objects:
            got = f"{name!r} twice" if name else "an empty one"
            raise ValueError(f"register: expected a name of its own, got {got}")
        missing = [n for n in _METHODS if not callable(getattr(registered, n, None))]
        if missing:
            raise TypeError(
                f"register({name!r}): expected an object with state_dict and "
                f"load_state_dict, got a {type(registered).__name__} without "
                f"{' and '.join(missing)}"
            )
        entry = _entry_of(registered)
        found = stranger(entry["state"]) or stranger(entry["metadata"])
        if found is not None:
            raise TypeError(
                f"register({name!r}): expected a state of tensors and plain values, "
                f"got one that does not travel, of {found}"
            )
        self._objects[name] = registered

    def tree(self) -> dict[str, Any]:
        """Return the states by name; the tensors are the objects' own, not copies."""
        if self._held is not None:
            return self._held
        return {name: _entry_of(self._objects[name]) for name in self.names}

    def load(self, tree: Mapping[str, Any], only: str | None = None) -> None:
        """Load what `tree` returned, by the objects' own methods.

        Args:
            tree: The states by name.
            only: The object to load; None: all.

        Raises:
            KeyError: the state of an object is not there. Whatever the methods raise.
        """
        for name, each in self._objects.items():
            if only not in (None, name):
                continue
            entry = tree[name]
            state = entry["state"]
            if entry["metadata"] is not None:  # what modules know versions by
                state = OrderedDict(state)
                state._metadata = entry["metadata"]  # type: ignore[attr-defined]
            each.load_state_dict(state)

    def hold(self) -> None:
        """Keep the states as they are, for `settle`.

        For a rank that was given those of one that is an operation ahead, where the
        script has done what it does between the two. Here it is still to be done, and
        would be done twice.
        """
        if self._objects:
            self._held = _copied(self.tree())

    def settle(self) -> None:
        """Load what is held, at the beginning of the next operation."""
        if self._held is not None:
            self.load(self._held)
            self._held = None


def _entry_of(registered: Any) -> dict[str, Any]:
    state = registered.state_dict()
    metadata = getattr(state, "_metadata", None)
    return {"state": with_numbers(_plain_dicts(state)), "metadata": metadata}


def _plain_dicts(tree: Any) -> Any:
    """Return a tree whose OrderedDicts are dicts, whose tensors travel as such."""
    if type(tree) in (dict, OrderedDict):
        return {key: _plain_dicts(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_plain_dicts, tree))
    return tree


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if type(tree) is dict:
        return {key: _copied(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_copied, tree))
    return tree
