"""Brings trees, modules and what optimizers hold from device to device, in place."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipetransformer.core.containers import map_tensors

HOST = torch.device("cpu")

_T = TypeVar("_T")


def to_device(tree: _T, device: torch.device) -> _T:
    """Return a structure whose tensors are on a device.

    Args:
        tree: A tensor, or tensors in tuples, lists and mappings; other values stay.
        device: Where to.

    Returns:
        The same structure; itself where every tensor is there already.
    """
    moved: _T = map_tensors(tree, lambda tensor: tensor.to(device))
    return moved


def device_of(tree: Any) -> torch.device | None:
    """Return the device of the first tensor of a structure; None without one."""
    if isinstance(tree, Tensor):
        return tree.device
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return None
    return next((found for part in tree if (found := device_of(part))), None)


def beside(tree: Any, other: _T) -> _T:
    """Return `other` with its tensors where the first tensor of `tree` is."""
    device = device_of(tree)
    return other if device is None else to_device(other, device)


def move_modules(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move parameters and buffers; every parameter stays the object that it is.

    So do optimizers, hooks and whoever else holds a parameter keep it. A buffer is
    replaced, as by ``nn.Module.to``. Gradients are moved, too.

    Args:
        modules: What is moved; what two of them share is moved once.
        device: Where to.
    """
    buffers: dict[int, Tensor] = {}
    for module in modules:
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None and parameter.device != device:
                    _move_parameter(parameter, device)
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device != device:
                    moved = buffers.setdefault(id(buffer), buffer.to(device))
                    part._buffers[name] = moved
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()  # cuDNN wants its weights in one piece


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    gradient, parameter.grad = parameter.grad, None
    moved = parameter.detach().to(device)
    if torch._has_compatible_shallow_copy_type(parameter, moved):
        parameter.data = moved
    else:  # of a backend that torch does not know to be like the host's
        other = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    if gradient is not None:
        parameter.grad = gradient.to(device)


def move_moments(
    optimizer: torch.optim.Optimizer,
    device_of: Callable[[nn.Parameter], torch.device],
) -> None:
    """Move what an optimizer holds for each parameter.

    Counts of steps stay on the host unless the optimizer keeps them on the device,
    which a fused or capturable one does; torch's own ``load_state_dict`` does the same.

    Args:
        optimizer: Any.
        device_of: Gives the device for what belongs to a parameter.
    """
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            held = optimizer.state.get(parameter)
            if not isinstance(held, dict):
                continue
            for name, value in held.items():
                if not isinstance(value, Tensor):
                    continue
                wanted = device_of(parameter)
                if name == "step" and not on_device:
                    wanted = HOST
                if value.device != wanted:
                    held[name] = value.to(wanted)


def empty_caches(devices: Iterable[torch.device]) -> None:
    """Give the memory that torch's allocators keep for later back to the devices."""
    for kind in {device.type for device in devices if device != HOST}:
        free = getattr(torch.get_device_module(kind), "empty_cache", None)
        if free is not None:
            free()


def memory_bytes(device: torch.device) -> int | None:
    """Return the memory of an accelerator; None where it does not tell.

    Makes no context on the device.
    """
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if ask is None else int(ask(device).total_memory)


def describe(device: torch.device) -> str:
    """Return what kind of device it is: its name, of the host that of its processor."""
    if device == HOST:
        return f"{_processor()}, {os.cpu_count()} cores"
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device.type} {ask(device)}" if ask is not None else device.type


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line for line in file if line.startswith("model name"))
            name = next(names, "").partition(":")[2].strip()
    except OSError:
        name = ""
    return name or platform.machine()


def identity(device: torch.device) -> str:
    """Return a text that two processes of a node have in common for a device alone."""
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if ask is None else getattr(ask(device), "uuid", None)
    return f"{device}" if uuid is None else f"{device.type} {uuid}"
