"""Checks of what a user gives to a pipeline's constructor."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from pipetransformer.pipe.build import find_extras
from pipetransformer.pipe.skip import verify_skippables
from pipetransformer.pipe.with_device import WithDevice

CHECKPOINT_MODES = ("always", "except_last", "never")
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
DISPATCHES = ("auto", "serial", "threads")


def check_chunks(chunks: int) -> None:
    """Raise ValueError unless there is at least one micro-batch."""
    if chunks <= 0:
        raise ValueError(f"chunks: expected at least 1, got {chunks}")
    if chunks >= 2**31:
        raise ValueError(f"chunks: expected less than 2**31, got {chunks}")


def check_mode(checkpoint: str) -> None:
    """Raise ValueError unless ``checkpoint`` is one of the three modes."""
    if checkpoint not in CHECKPOINT_MODES:
        raise ValueError(
            "checkpoint is not one of 'always', 'except_last', or 'never': got "
            f"{checkpoint!r}"
        )


def check_module(module: nn.Module) -> None:
    """Raise unless ``module`` is a Sequential of distinct children that fit.

    Warns of what it is besides: a pipeline calls the children alone.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be nn.Sequential to be partitioned, got "
            f"{type(module).__name__}"
        )
    extras = find_extras(module)
    if extras:
        warnings.warn(
            "module: expected nn.Sequential's own forward and nothing else, got "
            f"{type(module).__name__} with {' and '.join(extras)}; the layers are "
            "called one after another, without that",
            stacklevel=3,
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


def check_schedule(schedule: str, loss: Callable[..., object] | None) -> None:
    """Raise unless the schedule is known and has the loss that it needs.

    Raises:
        ValueError: for an unknown schedule, a missing or unused loss, and a loss with
            parameters that train: they would get no gradient.
        TypeError: if the loss is not callable.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {SCHEDULES}, got {schedule!r}")
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss: expected a function of output and targets, got "
            f"{type(loss).__name__}"
        )
    if (loss is None) != (schedule == "gpipe"):
        wanted = "none" if schedule == "gpipe" else "loss=fn(output, targets)"
        got = "none" if loss is None else type(loss).__name__
        raise ValueError(f"loss: expected {wanted} with {schedule!r}, got {got}")
    if isinstance(loss, nn.Module) and any(
        parameter.requires_grad for parameter in loss.parameters()
    ):
        raise ValueError(
            f"loss: expected no parameters that train, got {type(loss).__name__} with "
            "some; make it the last layer, or freeze them"
        )


def check_dispatch(dispatch: str) -> None:
    """Raise ValueError unless ``dispatch`` is known."""
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch: expected one of {DISPATCHES}, got {dispatch!r}")
