"""Checks of what a user gives to a pipeline's constructor."""

from __future__ import annotations

from torch import nn

from pipetransformer.pipe.skip import verify_skippables
from pipetransformer.pipe.with_device import WithDevice

CHECKPOINT_MODES = ("always", "except_last", "never")


def check_chunks(chunks: int) -> None:
    """Raise ValueError unless there is at least one micro-batch."""
    if chunks <= 0:
        raise ValueError(f"chunks: expected at least 1, got {chunks}")


def check_mode(checkpoint: str) -> None:
    """Raise ValueError unless ``checkpoint`` is one of the three modes."""
    if checkpoint not in CHECKPOINT_MODES:
        raise ValueError(
            "checkpoint is not one of 'always', 'except_last', or 'never': got "
            f"{checkpoint!r}"
        )


def check_module(module: nn.Module) -> None:
    """Raise unless ``module`` is a Sequential of distinct children that fit."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be nn.Sequential to be partitioned, got "
            f"{type(module).__name__}"
        )
    names: dict[int, str] = {}
    for name, child in module._modules.items():
        layer = child
        while isinstance(layer, WithDevice):
            layer = layer.module
        first = names.setdefault(id(layer), name)
        if first != name:
            raise ValueError(
                "module with duplicate children is not supported: expected every "
                f"child once, got the same object as {first!r} and {name!r}"
            )
    verify_skippables(module)
