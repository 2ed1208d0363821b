"""Measures the layers of a chain, on copies."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipetransformer.pipe.balance.chain import Chain, layerwise_sandbox

__all__ = ["layerwise_sandbox", "profile_sizes", "profile_times"]


def profile_times(
    module: nn.Sequential,
    sample: object,
    timeout: float,
    device: torch.device | str | int,
    *,
    spread: bool = True,
) -> list[float]:
    """Time forward plus backward of each layer.

    Args:
        module: The layers; left as they are.
        sample: Input of the first one: a tensor, or a tuple or list of tensors.
        timeout: Seconds after which no further pass over the layers starts; one that
            warms up and one that counts are made in any case.
        device: Where to run.
        spread: Whether a tuple or list is spread into arguments.

    Returns:
        Seconds of each layer, the median over the passes.

    Raises:
        ValueError: if a parameter holds a gradient.
    """
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError(
            "module: expected no gradients, got: some parameter already has gradient"
        )
    device = torch.device(device)
    seconds: list[list[float]] = [[] for _ in module]
    with _kept_random_state(device):
        layers = list(layerwise_sandbox(module, device))
        if not timeout >= 0:
            raise ValueError(f"timeout: expected seconds >= 0, got {timeout}")
        deadline = time.perf_counter() + timeout
        for num_passes in itertools.count():
            chain = Chain(sample, device, spread)
            for layer, measured in zip(layers, seconds, strict=True):
                layer.zero_grad(set_to_none=True)
                chain.next_input()
                forward = _time(lambda: chain.forward(layer), device)  # noqa: B023
                measured.append(forward + _time(chain.backward, device))
            # The first pass only warms up.
            if num_passes > 0 and time.perf_counter() >= deadline:
                break
    return [statistics.median(measured[1:]) for measured in seconds]


def profile_sizes(
    module: nn.Sequential,
    input: object,
    chunks: int,
    param_scale: float,
    device: torch.device | str | int,
    *,
    spread: bool = True,
    allocated: Callable[[torch.device], int] = torch.cuda.memory_allocated,
) -> list[int]:
    """Estimate the memory of each layer from the forward of one row.

    Args:
        module: The layers; left as they are.
        input: Input of the first one: a tensor ``(rows, ...)``, or a tuple or list.
        chunks: Micro-batches of a mini-batch.
        param_scale: Bytes held per byte of parameters, the optimizer's included.
        device: Where to run.
        spread: Whether a tuple or list is spread into arguments.
        allocated: Function that tells the bytes in use on a device.

    Returns:
        Bytes of each layer: activations of a micro-batch plus scaled parameters.
    """
    device = torch.device(device)
    tensors = [x for x in pytree.tree_leaves(input) if isinstance(x, torch.Tensor)]
    if not tensors:
        raise TypeError(f"input: expected a tensor in it, got {type(input).__name__}")
    row = pytree.tree_map_only(torch.Tensor, lambda x: x[:1], input)
    sizes = []
    with _kept_random_state(device):
        # Libraries take their workspaces in the first call of a kind and keep them.
        chain = Chain(row, device, spread)
        for layer in layerwise_sandbox(module, device):
            chain.next_input()
            chain.forward(layer)
        chain = Chain(row, device, spread)
        for layer in layerwise_sandbox(module, device):
            chain.next_input()
            before = allocated(device)
            chain.forward(layer)
            growth = (allocated(device) - before) * tensors[0].size(0) / chunks
            parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
            sizes.append(int(growth + parameters * param_scale))
    return sizes


def _kept_random_state(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _time(function: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
