"""Balancing of layers that take one value: a tuple is not spread."""

from __future__ import annotations

import torch
from torch import nn

from pipetransformer.compat.torchgpipe.balance.profile import (
    profile_sizes,
    profile_times,
)
from pipetransformer.pipe.balance.functions import (
    Device,
    by_costs,
    check_counts,
    check_is_cuda,
)

Value = torch.Tensor | tuple[torch.Tensor, ...]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Balance stages by time, see `pipetransformer.pipe.balance_by_time`.

    Args:
        partitions: Number of stages, at least 1.
        module: The layers; measured on copies in train mode.
        sample: Input: a tensor ``(rows, ...)`` or a tuple, handed over whole.
        timeout: Seconds to repeat the measurement for.
        device: Where to measure; None: with CUDA if there is a device, else the CPU.

    Returns:
        Layers per stage, in order.

    Raises:
        ValueError: if the module holds gradients, or has fewer layers than stages.
    """
    check_counts(partitions, module)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return by_costs(profile_times(module, sample, timeout, device), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Value,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = "cuda",
) -> list[int]:
    """Balance stages by memory, see `pipetransformer.pipe.balance_by_size`.

    Args:
        partitions: Number of stages, at least 1.
        module: The layers; measured on copies in train mode.
        input: Input: a tensor ``(rows, ...)`` or a tuple, handed over whole.
        chunks: Micro-batches of a mini-batch.
        param_scale: Bytes held per byte of parameters.
        device: CUDA device to measure on.

    Returns:
        Layers per stage, in order.

    Raises:
        ValueError: if the device is no CUDA device, or for fewer layers than stages.
    """
    check_counts(partitions, module)
    check_is_cuda(device)
    sizes = profile_sizes(module, input, chunks, param_scale, device)
    return by_costs(sizes, partitions)
