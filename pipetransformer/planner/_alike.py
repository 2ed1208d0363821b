"""Tells which layers cost the same, so that a stack of blocks is measured once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipetransformer.planner._flow import Flow
from pipetransformer.skip import Skippable

_UNORDERED = (set, frozenset)
_CONTAINERS = (tuple, list, dict, *_UNORDERED)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# What every module has (hooks, submodules, parameters, training): not a setting.
_MODULE_STATE = frozenset(vars(nn.Module())) - {"training"}
# Which layer it is, not what it does: what follows from it is a setting of its own.
_WHICH = frozenset(
    {
        "block_idx",
        "block_index",
        "layer_id",
        "layer_idx",
        "layer_index",
        "layer_number",
        "target_name",
    }
)
_DEEPEST, _LONGEST = 3, 32  # of containers that are compared by what they hold


def cost_key(layer: nn.Module, taken: Flow) -> Hashable:
    """Return what a layer's time depends on; equal keys mean equal work.

    The key holds classes, settings, and the shapes of parameters, buffers and inputs,
    never their values. A setting that is neither a plain value nor a container of
    such counts by identity: two layers that hold different objects are told apart.
    Namespaces of skips do not count, they say only whose they are; nor does what
    says which layer it is, such as ``layer_idx``.

    Args:
        layer: the layer.
        taken: what it is called with, and what it pops.

    Returns:
        A key that is valid while the layer lives.
    """
    modules = tuple(
        (name, type(module), module.extra_repr(), tuple(_settings(module)))
        for name, module in layer.named_modules(remove_duplicate=False)
    )
    named = [*layer.named_parameters(), *layer.named_buffers()]
    state = tuple((name, *_shape(tensor)) for name, tensor in named)
    popped = tuple((name, _argument(skip)) for (_, name), skip in taken.skips.items())
    return modules, state, _argument(taken.value), popped


def _argument(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return _shape(value)
    if isinstance(value, Mapping):
        return tuple((name, _argument(entry)) for name, entry in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_argument(entry) for entry in value)
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _settings(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    for name, value in sorted(vars(module).items()):
        if name in _MODULE_STATE:
            continue
        if isinstance(module, Skippable) and name == "namespaces":
            continue
        if _says_which(name, value):
            continue
        yield name, _shape(value) if isinstance(value, Tensor) else _content(value)


def _says_which(name: object, value: object) -> bool:
    return name in _WHICH and type(value) in (int, str)


def _content(value: object, depth: int = 0) -> Hashable:
    """Return what tells settings apart: plain values, also in containers; identity."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    # Others than these very classes may make what they hold as it is asked for.
    if not isinstance(value, _CONTAINERS) or kind not in (*_CONTAINERS, torch.Size):
        return id(value)
    if depth == _DEEPEST or len(value) > _LONGEST:
        return id(value)
    deeper = depth + 1
    if isinstance(value, dict):
        return kind, tuple(
            (_content(name, deeper), _content(entry, deeper))
            for name, entry in value.items()
            if not _says_which(name, entry)
        )
    entries = [_content(entry, deeper) for entry in value]
    return kind, frozenset(entries) if kind in _UNORDERED else tuple(entries)


def _shape(tensor: Tensor) -> tuple[Hashable, ...]:
    if is_lazy(tensor):
        return (id(tensor),)  # its shape is not known yet
    return (
        tuple(tensor.shape),
        tensor.stride() if tensor.layout == torch.strided else str(tensor.layout),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )
