"""A pipeline's layers stay on the devices of their stages."""

from __future__ import annotations

from typing import NoReturn, TypeVar

import torch
from torch import nn

T = TypeVar("T", bound="FixedPlacement")


class FixedPlacement(nn.Module):
    """A module that may be cast to another dtype but not moved to another device.

    Each refusal is a TypeError of its own, so that one kept by somebody does not
    keep or gain the frames of another.
    """

    def cuda(self, device: int | torch.device | None = None) -> NoReturn:
        """Refuse to move: raises TypeError."""
        raise _refusal("cuda()")

    def cpu(self) -> NoReturn:
        """Refuse to move: raises TypeError."""
        raise _refusal("cpu()")

    def xpu(self, device: int | torch.device | None = None) -> NoReturn:
        """Refuse to move: raises TypeError."""
        raise _refusal("xpu()")

    def ipu(self, device: int | torch.device | None = None) -> NoReturn:
        """Refuse to move: raises TypeError."""
        raise _refusal("ipu()")

    def mtia(self, device: int | torch.device | None = None) -> NoReturn:
        """Refuse to move: raises TypeError."""
        raise _refusal("mtia()")

    def to_empty(
        self, *, device: torch.device | str | int | None, recurse: bool = True
    ) -> NoReturn:
        """Refuse to move: raises TypeError."""
        raise _refusal(f"to_empty(device={str(device)!r})")

    def to(self: T, *args: object, **kwargs: object) -> T:
        """Cast to a dtype or memory format, as `torch.nn.Module.to` does.

        Args:
            *args: A ``torch.dtype`` and the flag ``non_blocking``.
            **kwargs: ``dtype``, ``memory_format``, ``non_blocking``.

        Raises:
            TypeError: for a device, also the present one, or a tensor to be like.
        """
        for value in args:
            is_index = isinstance(value, int) and not isinstance(value, bool)
            if is_index or isinstance(value, (str, torch.device, torch.Tensor)):
                raise _refusal(f"to({_text(value)})")
        for name in ("device", "tensor"):
            if kwargs.get(name) is not None:
                raise _refusal(f"to({name}={_text(kwargs[name])})")
        nn.Module.to(self, *args, **kwargs)  # type: ignore[call-overload]
        return self


def _text(value: object) -> str:
    return "tensor" if isinstance(value, torch.Tensor) else repr(value)


def _refusal(call: str) -> TypeError:
    return TypeError(
        "moving parameters and buffers is not supported, casting to a dtype is: "
        "expected the layers to stay on the devices of their stages, where they were "
        f"when the pipeline was built, got {call}"
    )
