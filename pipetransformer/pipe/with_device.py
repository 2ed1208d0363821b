"""A wrapper that tells a pipeline where a layer belongs."""

from __future__ import annotations

import torch
from torch import nn


class WithDevice(nn.Module):
    """Names the device of a layer, such as one without parameters.

    `Pipe` moves the layer there and runs it without this wrapper; elsewhere the
    wrapper passes calls through and moves nothing.

    Args:
        module: The layer.
        device: Its device.

    Example:
        >>> first = nn.Linear(4, 4).cuda(1)
        >>> Pipe(nn.Sequential(first, WithDevice(nn.ReLU(), "cuda:1")))
    """

    def __init__(self, module: nn.Module, device: torch.device | str | int) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device(device)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the layer."""
        return self.module(*args, **kwargs)

    def extra_repr(self) -> str:
        """Show the device."""
        return f"device={str(self.device)!r}"


def unwrap(module: nn.Module) -> tuple[nn.Module, torch.device | None]:
    """Take a layer out of its wrappers.

    Returns:
        The layer, and the device that the outermost wrapper names, with its index, or
        None when there is no wrapper.
    """
    device: torch.device | None = None
    while isinstance(module, WithDevice):
        device = device or module.device
        module = module.module
    # "cuda" means the current one: an allocation tells its index.
    return module, None if device is None else torch.empty(0, device=device).device
