"""Trees of plain values and tensors as a small text, and back.

State dicts are nested dicts, lists and tuples. The text tells everything about them
but what the tensors hold, of which it tells shape, dtype and place. It is read in
milliseconds, where ``torch.load(weights_only=True)`` takes many, and runs no code.

A place is the host or the number of a device among those of a pipeline, which has
another name for every reader.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, str)
_REFUSALS = (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError)
_MARK = "!"  # the key that tells an object of this module from a user's dict


def encode(
    tree: Any, devices: Sequence[torch.device] = ()
) -> tuple[bytes, list[Tensor]]:
    """Return the text of a tree and its tensors, in the order of the text.

    Dicts, lists, tuples, numbers, texts and None of exactly these types keep value
    and type. Anything else is embedded as `torch.save` writes it.

    Args:
        tree: The tree.
        devices: Those that the reader has others for; what is elsewhere counts as on
            the host.
    """
    tensors: list[Tensor] = []
    return json.dumps(_encoded(tree, tensors, devices)).encode(), tensors


def decode(
    message: bytes, devices: Sequence[torch.device] = ()
) -> tuple[Any, list[Tensor]]:
    """Read a text of `encode`.

    Args:
        message: The text.
        devices: In place of those of the writer, in their order.

    Returns:
        The tree with new tensors, which hold anything, and the same tensors in the
        order of the text.

    Raises:
        pickle.UnpicklingError: an embedded value is no plain data.
    """
    tensors: list[Tensor] = []

    def restore(found: dict[str, Any]) -> Any:
        kind = found.get(_MARK)
        if kind is None:
            return found
        value = found["of"]
        if kind == "tensor":
            dtype, place, *shape = value
            device = None if place is None else devices[place]
            tensors.append(
                torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            )
            return tensors[-1]
        if kind == "tuple":
            return tuple(value)
        if kind == "dict":
            return {key: item for key, item in value}
        saved = io.BytesIO(base64.b64decode(value))
        return torch.load(saved, weights_only=True)

    return json.loads(message, object_hook=restore), tensors


def named_tensors(tree: Any, path: str = "") -> dict[str, Tensor]:
    """Return the tensors of a tree in the order of `encode`, by their path.

    A path is like "optimizer state 3 exp_avg".
    """
    found: dict[str, Tensor] = {}
    items: Iterable[tuple[Any, Any]] = ()
    if type(tree) is dict:
        items = tree.items()
    elif type(tree) in (list, tuple):
        items = enumerate(tree)
    for key, item in items:
        # Quoted unless a plain word, so that no two paths are the same.
        word = key if type(key) is str and key.isidentifier() else repr(key)
        below = f"{path} {word}" if path else word
        if isinstance(item, Tensor):
            found[below] = item
        else:
            found.update(named_tensors(item, below))
    return found


def with_numbers(tree: Any) -> Any:
    """Return a tree with numbers in place of numpy's scalars.

    Scripts compute them, as by ``np.cos`` or ``np.mean``, and nothing reads them back
    safely.
    """
    if type(tree) is dict:
        return {key: with_numbers(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(with_numbers(value) for value in tree)
    if type(tree).__module__ == "numpy" and getattr(tree, "ndim", None) == 0:
        return tree.item()
    return tree


def stranger(tree: Any) -> str | None:
    """Name the first part of a tree that cannot be read back; None: all of it can.

    Returns:
        Its type and path, like "Fraction at ['lr']".
    """
    return None if _travels(tree) else _stranger(tree, "")


def _travels(tree: Any) -> bool:
    try:
        decode(encode(tree)[0])
    except _REFUSALS:
        return False
    return True


def _stranger(tree: Any, path: str) -> str:
    parts: Iterable[tuple[Any, Any]] = ()
    if type(tree) is dict:
        parts = tree.items()
    elif type(tree) in (list, tuple):
        parts = enumerate(tree)
    for key, part in parts:
        if not _travels(part):
            return _stranger(part, f"{path}[{key!r}]")
    return f"{type(tree).__name__} at {path}"


def _encoded(tree: Any, tensors: list[Tensor], devices: Sequence[torch.device]) -> Any:
    """Return the tree in types that JSON gives back unchanged."""

    def inner(part: Any) -> Any:
        return _encoded(part, tensors, devices)

    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind is list:
        return [inner(item) for item in tree]
    if isinstance(tree, Tensor):
        tensors.append(tree)
        place = devices.index(tree.device) if tree.device in devices else None
        dtype = str(tree.dtype).removeprefix("torch.")
        return _marked("tensor", [dtype, place, *tree.shape])
    if kind is tuple:
        return _marked("tuple", [inner(item) for item in tree])
    if kind is dict and all(type(key) is str for key in tree) and _MARK not in tree:
        return {key: inner(item) for key, item in tree.items()}
    if kind is dict:
        return _marked("dict", [[inner(k), inner(item)] for k, item in tree.items()])
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return _marked("saved", base64.b64encode(buffer.getvalue()).decode())


def _marked(kind: str, content: Any) -> dict[str, Any]:
    return {_MARK: kind, "of": content}
