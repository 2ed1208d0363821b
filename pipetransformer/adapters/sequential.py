"""An ``nn.Sequential`` of groups -> a flat Sequential of layers plus freeze units."""

from __future__ import annotations

from collections import Counter, OrderedDict

from torch import nn

from pipetransformer.pipe.build import find_extras


def _layers_of(group: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a group that does nothing but call them; else none."""
    if not isinstance(group, nn.Sequential) or find_extras(group):
        return {}
    # Others may spread a tuple over the next layer's arguments.
    if type(group).forward is not nn.Sequential.forward:
        return {}
    return {name: layer for name, layer in group._modules.items() if layer is not None}


def sequential(model: nn.Sequential) -> tuple[nn.Sequential, list[int]]:
    """Flatten the plain groups of a Sequential; each group becomes one freeze unit.

    Args:
        model: A Sequential whose elements are layers or plain ``nn.Sequential``
            groups of layers (no own forward, hooks, parameters or buffers, no layer
            that stands in the model twice); other groups stay whole. The last element
            is the head and never freezes.

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
    groups = [_layers_of(element) for element in model]
    times: Counter[nn.Module] = Counter()
    for element, group in zip(model, groups, strict=True):
        times.update(group.values() or [element])
    layers: OrderedDict[str, nn.Module] = OrderedDict()

    def add(name: str, layer: nn.Module) -> None:
        while name in layers:  # of a group "a" and a layer "a_0"
            name += "_"
        layers[name] = layer

    ends: list[int] = []
    # Names of repeated elements, too.
    for name, element, group in zip(model._modules, model, groups, strict=True):
        if group and all(times[layer] == 1 for layer in group.values()):
            for inner, layer in group.items():
                add(f"{name}_{inner}", layer)
        else:
            add(name, element)
        ends.append(len(layers))
    return nn.Sequential(layers), ends[:-1]
