"""Tensors that every micro-batch gets whole."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pipetransformer import _C

NoChunk = _C.pipe.NoChunk
"""``NoChunk(tensor)``, anywhere in the arguments of a pipeline: a tensor that every
micro-batch gets whole. Its gradients add up; `tensor` gives it back."""


def unwrap_whole(value: object, *, depth: int = -1) -> object:
    """Put the tensor in the place of each `NoChunk`.

    Args:
        value: An argument, or a container of arguments: a tuple, list or dict.
        depth: How many containers deep to look; -1: all the way.
    """
    if type(value) is Tensor:
        return value
    if isinstance(value, NoChunk):
        return value.tensor
    if depth == 0:
        return value
    if type(value) is dict:
        return {k: unwrap_whole(item, depth=depth - 1) for k, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [unwrap_whole(item, depth=depth - 1) for item in value]
        make: Callable[..., object] = type(value)
        if make in (tuple, list):
            return make(items)
        if hasattr(value, "_fields"):
            return make(*items)
    return value
