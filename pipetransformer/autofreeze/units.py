"""Freeze units: which layers freeze together, and where a boundary may lie.

A unit is a group of consecutive layers. Units are given by their ends: unit u holds
the layers ``ends[u - 1] .. ends[u] - 1``. The last layer (the head) is in none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from torch import nn

from pipetransformer.autofreeze.policy import check_count
from pipetransformer.skip import Skippable


def resolve_units(num_layers: int, units: Sequence[int] | None) -> tuple[int, ...]:
    """Ends of the freeze units of a model.

    Args:
        num_layers: layers of the model, at least 1.
        units: layer index after each unit, or None for one unit per layer but the
            last.

    Raises:
        ValueError: ends that do not increase, or that leave the last layer no place.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers: expected a count >= 1, got {num_layers}")
    if units is None:
        return tuple(range(1, num_layers))
    ends = tuple(check_count("units", end) for end in units)
    for before, end in zip((0, *ends), ends, strict=False):
        if end <= before:
            raise ValueError(
                f"units: expected increasing layer indices from 1, got {list(ends)}"
            )
    if ends and ends[-1] >= num_layers:
        raise ValueError(
            f"units: expected ends below {num_layers}, so that the last layer stays "
            f"active, got {ends[-1]}"
        )
    return ends


def starting_units(layers: nn.Sequential, unit_ends: Sequence[int]) -> int:
    """How many front units hold nothing to train, and so begin frozen.

    Layers without parameters count only before one whose parameters do not train: a
    dropout right before the first layer that trains stays active.

    Args:
        layers: the whole model, with the flags that the user gave its parameters.
        unit_ends: from ``resolve_units``.
    """
    end = 0
    for index, layer in enumerate(layers):
        flags = [parameter.requires_grad for parameter in layer.parameters()]
        if any(flags):
            break
        end = index + 1 if flags else end
    return sum(1 for unit_end in unit_ends if unit_end <= end)


def noise_in_front(layers: nn.Sequential, boundary: int) -> list[str]:
    """Name the layers before the first parameter that do more in training.

    Such as augmentation: frozen, they run in evaluation mode. Dropout behind the first
    parameter is not meant, since frozen encoders usually run without.

    Args:
        layers: the whole model.
        boundary: end of the frozen layers.
    """
    found = []
    for index, layer in enumerate(list(layers)[:boundary]):
        if next(layer.parameters(), None) is not None:
            break
        if any(map(_asks_for_mode, layer.modules())):
            found.append(f"{index} ({type(layer).__name__})")
    return found


def _asks_for_mode(module: nn.Module) -> bool:
    """Tell whether the forward of a module reads its ``training``."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return "training" in getattr(code, "co_names", ())


def boundary_of(unit_ends: Sequence[int], num_frozen_units: int) -> int:
    """Index of the first active layer when `num_frozen_units` units are frozen.

    Raises:
        ValueError: more units than there are.
    """
    check_count("num_frozen_units", num_frozen_units, len(unit_ends))
    return unit_ends[num_frozen_units - 1] if num_frozen_units > 0 else 0


def movable_boundary(
    layers: nn.Sequential, unit_ends: Sequence[int], wanted_units: int
) -> tuple[int, str | None]:
    """How many of the wanted units can freeze without touching an active layer.

    A parameter, buffer or module that a frozen layer shares with an active one (tied
    embeddings) would freeze in both, so it holds the boundary before it. So does a
    skip that a frozen layer would stash for an active one: what is kept of frozen
    layers is the output of the last one alone.

    Args:
        layers: the whole model.
        unit_ends: from ``resolve_units``.
        wanted_units: a policy's decision.

    Returns:
        The number of units, and the reason if it is less than wanted.
    """
    allowed = wanted_units
    reason = None
    while allowed > 0:
        shared = _shared_across(layers, boundary_of(unit_ends, allowed))
        if shared is None:
            break
        frozen, active, what = shared
        # Hold before the unit of the frozen layer that shares.
        allowed = sum(1 for end in unit_ends[:allowed] if end <= frozen)
        reason = (
            f"layers {frozen} and {active} share {what}: {allowed} of "
            f"{wanted_units} units can freeze"
        )
    return allowed, reason


def _shared_across(layers: nn.Sequential, boundary: int) -> tuple[int, int, str] | None:
    owners: dict[Hashable, int] = {}
    for index, layer in enumerate(layers):
        for what, part in _parts(layer):
            owner = owners.setdefault(part, index)
            if owner < boundary <= index:
                return owner, index, what
    return None


def _parts(layer: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Yield what a layer may share with others: a name, and what tells it apart."""
    for name, parameter in layer.named_parameters():
        yield f"the parameter {name}", id(parameter)
    for name, buffer in layer.named_buffers():
        yield f"the buffer {name}", id(buffer)
    for name, module in layer.named_modules():
        yield f"the module {name or type(layer).__name__}", id(module)
        if isinstance(module, Skippable):
            for key in (*module.stashable(), *module.poppable()):
                yield f"the skip {key[1]!r}", key
