"""Checks of what a call of a pipeline is given, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch


def check_inputs(
    inputs: Sequence[object],
    kwargs: Mapping[str, object],
    device: torch.device | None,
    *,
    strict: bool = False,
    nested: bool = False,
) -> None:
    """Raise unless a pipeline can cut and run these arguments.

    Args:
        inputs: Positional arguments of the first layer.
        kwargs: Its keyword arguments.
        device: The first stage's device; None when there is no stage.
        strict: Follow the old interface: no keyword arguments; what containers hold
            is not looked at.
        nested: A tensor in a container is enough: layers in the middle of a model
            get what the one before them returned.

    Raises:
        TypeError: if no argument is, or with `nested` holds, a tensor; for keyword
            arguments that no layer takes.
        RuntimeError: for an argument that is a 0-dim tensor, which has no rows; without
            a stage nothing is cut.
        ValueError: for a tensor on another device, in a container too.
    """
    if kwargs and (strict or device is None):
        reason = "strict compatibility" if strict else "a pipeline without layers"
        raise TypeError(
            f"keyword arguments: expected none ({reason}), got {sorted(kwargs)}"
        )
    if len(inputs) == 1 and not kwargs and type(inputs[0]) is torch.Tensor:
        only = inputs[0]
        if device is None or (only.dim() > 0 and only.device == device):
            return
    values = (*inputs, *kwargs.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if nested and not tensors:
        tensors = list(_leaves(values))
    if not tensors:
        kinds = [type(value).__name__ for value in values]
        raise TypeError(f"inputs: expected at least one tensor among them, got {kinds}")
    for tensor in tensors:
        if device is not None and tensor.dim() == 0:
            raise RuntimeError(
                "inputs: expected tensors with rows along dimension 0, got a "
                "zero-dimensional one"
            )
    for tensor in tensors if strict else _leaves(values):
        if device is not None and tensor.device != device:
            raise ValueError(
                "All inputs should be on the same device as the first partition: "
                f"expected {device}, got {tensor.device}"
            )


def _leaves(value: object) -> Iterator[torch.Tensor]:
    """Tensors in the containers that are taken apart; a NoChunk is none of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is dict:
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (tuple, list)) and (
        type(value) in (tuple, list) or hasattr(value, "_fields")
    ):
        for item in value:
            yield from _leaves(item)
