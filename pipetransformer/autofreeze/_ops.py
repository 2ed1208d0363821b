"""The ops of this room, typed."""

from __future__ import annotations

import torch

from pipetransformer import _C  # noqa: F401  # loads the extension


def squared_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of each tensor.

    Args:
        tensors: floating-point tensors of any shapes on one device.

    Returns:
        ``(len(tensors),)`` float64 on that device (CPU for an empty list). Not
        differentiable.

    Raises:
        ValueError: a tensor that is not floating-point or on another device.
    """
    norms: torch.Tensor = torch.ops.pipetransformer.squared_norms(tensors)
    return norms


def l1_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of absolute values of each tensor; otherwise as `squared_norms`."""
    norms: torch.Tensor = torch.ops.pipetransformer.l1_norms(tensors)
    return norms
