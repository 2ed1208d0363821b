"""An ``nn.Sequential`` of groups -> a flat Sequential of layers plus freeze units."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def _is_plain(module: nn.Module) -> bool:
    """Tell whether a module does nothing but call its children in order."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return (
        type(module) is nn.Sequential
        and len(module) > 0
        and not any(getattr(module, name) for name in hooks)
    )


def sequential(model: nn.Sequential) -> tuple[nn.Sequential, list[int]]:
    """Flatten the plain groups of a Sequential; each group becomes one freeze unit.

    Args:
        model: A Sequential whose elements are layers or plain ``nn.Sequential``
            groups of layers (no own forward, no hooks). The last element is the head
            and never freezes.

    Returns:
        The flat Sequential, made of the same layer objects, and the ``units``
        argument of the engine: the layer index after each group but the last.

    Raises:
        TypeError: `model` is not an ``nn.Sequential``.
        ValueError: fewer than two elements: nothing could freeze before the head; a
            forward of its own, which would get lost.
    """
    if not isinstance(model, nn.Sequential):
        kind = type(model).__name__
        raise TypeError(f"model: expected an nn.Sequential, got {kind}")
    if type(model).forward is not nn.Sequential.forward or "forward" in vars(model):
        raise ValueError(
            "model: expected an nn.Sequential whose elements are called one after "
            f"another, got {type(model).__name__} with a forward of its own; make what "
            "it does besides a layer"
        )
    if len(model) < 2:
        raise ValueError(f"model: expected at least 2 elements, got {len(model)}")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    ends: list[int] = []
    for name, element in model.named_children():
        if _is_plain(element):
            for inner, layer in element.named_children():
                layers[f"{name}_{inner}"] = layer
        else:
            layers[name] = element
        ends.append(len(layers))
    return nn.Sequential(layers), ends[:-1]
