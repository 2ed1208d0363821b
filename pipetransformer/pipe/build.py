"""Checks of the user's Sequential and how it becomes stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipetransformer.pipe.stage import PipeSequential

CHECKPOINT_MODES = ("always", "except_last", "never")
_CPU = torch.device("cpu")


def check_mode(checkpoint: str) -> None:
    """Raise ValueError unless ``checkpoint`` is one of the three modes."""
    if checkpoint not in CHECKPOINT_MODES:
        raise ValueError(
            "checkpoint is not one of 'always', 'except_last', or 'never': got "
            f"{checkpoint!r}"
        )


def check_module(module: nn.Module) -> None:
    """Raise unless ``module`` is a Sequential of distinct children."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be nn.Sequential to be partitioned, got "
            f"{type(module).__name__}"
        )
    children = list(module._modules.values())
    if len({id(child) for child in children}) != len(children):
        raise ValueError(
            "module with duplicate children is not supported: expected every child "
            "once, got the same object twice"
        )


def stages_by_device(
    module: nn.Sequential,
) -> tuple[list[PipeSequential], list[torch.device]]:
    """Cut by the children's devices; every CPU child is a stage of its own.

    A child without parameters joins the stage before it; on CPU it is its own
    stage. A plain nested Sequential is flattened one level inside its stage.
    """
    groups: list[list[nn.Module]] = []
    devices: list[torch.device] = []
    for child in module:
        device = _device_of(child, devices[-1] if devices else _CPU)
        if not devices or device != devices[-1] or device.type == "cpu":
            groups.append([])
            devices.append(device)
        groups[-1] += _flatten(child)
    stages = []
    first = 0
    for layers in groups:
        stages.append(PipeSequential(*layers, first_layer=first))
        first += len(layers)
    _check_shared(stages, devices)
    return stages, devices


def stages_by_cuts(
    layers: nn.Sequential,
    cuts: Sequence[int],
    devices: Sequence[torch.device] | None,
    first_layer: int,
) -> tuple[list[PipeSequential], list[torch.device]]:
    """Cut at given layer indices; devices None means CPU slots."""
    cuts = [int(cut) for cut in cuts]
    rising = all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != len(layers) or not rising:
        raise ValueError(
            f"cuts: expected rising layer indices from 0 to {len(layers)}, got {cuts}"
        )
    num_stages = len(cuts) - 1
    places = [_CPU] * num_stages if devices is None else list(devices)
    if len(places) != num_stages:
        raise ValueError(
            f"devices: expected one per stage ({num_stages}), got {len(places)}"
        )
    children = list(layers)
    stages = [
        PipeSequential(*children[a:b], first_layer=first_layer + a)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    for stage, place in zip(stages, places, strict=True):
        for parameter in stage.parameters():
            if parameter.device != place:
                raise ValueError(
                    f"stage layers: expected parameters on {place}, got one on "
                    f"{parameter.device}"
                )
    _check_shared(stages, places)
    return stages, places


def _device_of(child: nn.Module, default: torch.device) -> torch.device:
    found = {parameter.device for parameter in child.parameters()}
    if len(found) > 1:
        raise ValueError(
            f"{type(child).__name__}: should have all parameters on a single device, "
            "please use .to() to place the module on a single device; got "
            f"{sorted(str(device) for device in found)}"
        )
    return found.pop() if found else default


def _flatten(child: nn.Module) -> list[nn.Module]:
    hooked = any(
        getattr(child, name)
        for name in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        )
    )
    if type(child) is nn.Sequential and not hooked:
        return list(child)
    return [child]


def _check_shared(stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    owner: dict[int, torch.device] = {}
    for stage, device in zip(stages, devices, strict=True):
        for parameter in stage.parameters():
            if owner.setdefault(id(parameter), device) != device:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not "
                    f"supported: expected one device, got {owner[id(parameter)]} and "
                    f"{device}"
                )
