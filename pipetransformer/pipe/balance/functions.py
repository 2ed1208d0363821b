"""How many layers each stage gets, from measured costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipetransformer.pipe.balance.blockpartition import solve
from pipetransformer.pipe.balance.profile import profile_sizes, profile_times

Device = torch.device | str | int


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: object,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Balance stages by the time of forward plus backward.

    Args:
        partitions: Number of stages, at least 1.
        module: The layers; measured on copies in train mode.
        sample: Input of the first layer: a tensor ``(rows, ...)``, or a tuple or list
            of arguments; best of the size of a micro-batch.
        timeout: Seconds to repeat the measurement for.
        device: Where to measure; None: with CUDA if there is a device, else the CPU.

    Returns:
        Layers per stage, in order; the slowest stage is as fast as it can be.

    Raises:
        ValueError: if the module holds gradients, or has fewer layers than stages.

    Example:
        >>> balance = balance_by_time(torch.cuda.device_count(), model, sample)
    """
    check_counts(partitions, module)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return by_costs(profile_times(module, sample, timeout, device), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: object,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = "cuda",
) -> list[int]:
    """Balance stages by memory: activations of a micro-batch and parameters.

    Args:
        partitions: Number of stages, at least 1.
        module: The layers; measured on copies in train mode.
        input: Input of the first layer: a tensor ``(rows, ...)``, or a tuple or list
            of arguments, of the size of a mini-batch; only one row is run.
        chunks: Micro-batches of a mini-batch.
        param_scale: Bytes held per byte of parameters. A guide: SGD 2 to 3, Adam 4 to
            5, Adadelta 4, Adagrad 3, RMSprop 3 to 5.
        device: CUDA device to measure on.

    Returns:
        Layers per stage, in order; the largest stage is as small as it can be.

    Raises:
        ValueError: if the device is no CUDA device, or for fewer layers than stages.
    """
    check_counts(partitions, module)
    check_is_cuda(device)
    sizes = profile_sizes(module, input, chunks, param_scale, device)
    return by_costs(sizes, partitions)


def by_costs(costs: Sequence[float], partitions: int) -> list[int]:
    """Layers per stage for given costs of the layers."""
    return [len(block) for block in solve(costs, partitions)]


def check_counts(partitions: int, module: nn.Sequential) -> None:
    """Raise ValueError before anything is measured for nothing."""
    solve([0] * len(module), partitions)


def check_is_cuda(device: Device) -> None:
    """Raise ValueError unless memory can be measured on ``device``."""
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return
    raise ValueError(f"device: expected a CUDA device, got {device}")
