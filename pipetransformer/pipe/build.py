"""The stage rule: how the layers of a Sequential become stages on devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from pipetransformer.pipe.stage import PipeSequential
from pipetransformer.pipe.with_device import WithDevice, unwrap

_CPU = torch.device("cpu")


def stages_by_device(
    module: nn.Sequential, *, strict: bool = False
) -> tuple[list[PipeSequential], list[torch.device]]:
    """Cut by the children's devices; every CPU child with parameters is a stage.

    A child's device is that of its parameters, or the one that a `WithDevice` names,
    to which the child is moved. A child without either joins the stage before it, so
    an activation in place does not change what that stage has handed on. A plain
    nested Sequential or `PipeSequential` is flattened one level inside its stage.

    Args:
        module: The user's layers.
        strict: Follow the old interface: a child without parameters is a CPU stage,
            and a nested Sequential is flattened in any case.
    """
    children, places = _place(module, strict)
    groups: list[list[tuple[str, nn.Module]]] = []
    devices: list[torch.device] = []
    for name, child, device in zip(module._modules, children, places, strict=True):
        alone = device.type == "cpu" and (
            strict
            or isinstance(module._modules[name], WithDevice)
            or next(child.parameters(), None) is not None
        )
        if not devices or device != devices[-1] or alone:
            groups.append([])
            devices.append(device)
        groups[-1] += _flatten(name, child, strict)
    return list(_make_stages(groups, strict)), devices


def _place(
    module: nn.Sequential, strict: bool
) -> tuple[list[nn.Module], list[torch.device]]:
    """The children without wrappers, and their devices, to which they are moved."""
    unwrapped = [unwrap(child) for child in module]
    places: list[torch.device] = []
    for child, wanted in unwrapped:
        default = places[-1] if places and not strict else _CPU
        places.append(wanted or _device_of(child, default))
    children = [child for child, _ in unwrapped]
    _check_shared(children, places)
    for child, wanted in unwrapped:
        if wanted is not None:
            child.to(wanted)
    return children, places


def _make_stages(
    groups: list[list[tuple[str, nn.Module]]], strict: bool
) -> Iterator[PipeSequential]:
    first = 0
    for group in groups:
        yield PipeSequential(
            *(layer for _, layer in group),
            first_layer=first,
            plain_names=[name for name, _ in group],
            spreads_lists=not strict,
        )
        first += len(group)


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
    names = list(layers._modules)
    stages = [
        PipeSequential(
            *children[a:b], first_layer=first_layer + a, plain_names=names[a:b]
        )
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


def _flatten(
    name: str, child: nn.Module, strict: bool
) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a child with their names in the user's Sequential."""
    if isinstance(child, nn.Sequential) and (strict or not find_extras(child)):
        for inner_name, inner in zip(child._modules, child, strict=True):
            yield f"{name}.{inner_name}", inner
    else:
        yield name, child


def find_extras(module: nn.Sequential) -> list[str]:
    """Name what gets lost when the children of a Sequential are called in its place.

    Returns:
        Nothing where calling it means calling its children, also as a stage calls its
        layers, with tuples spread.
    """
    state = vars(module)
    plain = type(module).forward in (nn.Sequential.forward, PipeSequential.forward)
    extras = {
        "another one": not plain or "forward" in state,
        "a call of its own": type(module).__call__ is not nn.Module.__call__,
        "a compiled call": "_compiled_call_impl" in state,
        "hooks": any(value for key, value in state.items() if key.endswith("_hooks")),
        "parameters of its own": module._parameters,
        "buffers of its own": module._buffers,
    }
    return [name for name, found in extras.items() if found]


def _check_shared(owners: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    place: dict[int, torch.device] = {}
    for owner, device in zip(owners, devices, strict=True):
        for parameter in owner.parameters():
            if place.setdefault(id(parameter), device) != device:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not "
                    f"supported: expected one device, got {place[id(parameter)]} and "
                    f"{device}"
                )
