"""What identifies a frozen prefix, and whether its values may be cached."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipetransformer import _C
from pipetransformer.autocache.content import (
    hash_content,
    is_plain,
    without_addresses,
)
from pipetransformer.autocache.settings_text import SettingsText
from pipetransformer.skip import inspect_lanes

# What every module has (hooks, submodules, parameters, training): not a setting.
_MODULE_STATE = frozenset(vars(nn.Module()))


def fingerprint_chain(
    layers: Sequence[nn.Module], count: int, *, context: object = ""
) -> list[int]:
    """Fingerprint every prefix of up to `count` layers.

    Element ``b`` stands for the first ``b`` layers: their classes, settings, parameter
    and buffer names, dtypes, shapes and bytes, and of which layers they pop skips. A
    change in layer ``j`` changes all elements after ``j`` and none before. Train and
    eval mode do not count, because a cached prefix runs in eval mode.

    Args:
        layers: the model's layers in order.
        count: length of the longest prefix.
        context: whatever else the values depend on, see `values_context`; its
            ``str()`` counts.

    Returns:
        ``count + 1`` integers in ``0 .. 2**64 - 1``.

    Raises:
        ValueError: if there are fewer than `count` layers.

    Source: the cache key of PipeTransformer (ICML 2021), made safe against changes.
    """
    if not 0 <= count <= len(layers):
        raise ValueError(
            f"count: expected a number in 0..{len(layers)} (the layers), got {count}"
        )
    texts = SettingsText()
    chain = [_C.core.hash_bytes(f"prefix\n{context}".encode())]
    popped: dict[int, list[str]] = collections.defaultdict(list)
    for lane in inspect_lanes(layers[:count]):
        # Not the namespace: it differs between processes that hold the same layer.
        popped[lane.destination].append(f"pops {lane.name} of layer {lane.source}")
    for index, layer in enumerate(layers[:count]):
        before = chain[-1]
        if index in popped:
            before = _C.core.hash_bytes("\n".join(popped[index]).encode(), before)
        chain.append(_fingerprint(layer, before, texts))
    return chain


_PRECISE = tuple(
    getattr(backend, operator)
    for backend in (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
    for operator in ("matmul", "conv", "rnn")
    if hasattr(getattr(backend, operator, None), "fp32_precision")
)


def values_context() -> tuple[object, ...]:
    """Return what is in force in this thread that changes what layers compute.

    Autocast of every device there is, the default dtype and the precision of float32
    products; for the `context` of `fingerprint_chain`. Asked for before every batch.
    """
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    casts = tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    )
    precisions = tuple(operator.fp32_precision for operator in _PRECISE)
    return casts, torch.get_default_dtype(), precisions


def cacheable(layers: Sequence[nn.Module], *, frozen: bool = True) -> str | None:
    """Say why a prefix must not be cached, as far as its modules tell.

    Args:
        layers: the frozen layers in order, in eval mode.
        frozen: False: they will be put into eval mode, so train mode is no reason.

    Returns:
        None if each output row looks like a function of its input row alone; else the
        reason, for a report.
    """
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            where = f"layer {index} ({_path(layer, name, module)})"
            if frozen and module.training:
                return f"{where} is in train mode"
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                return f"{where} normalises with the statistics of each batch"
            for label, tensor in _own_tensors(module):
                if hash_content(tensor, 0) is None:
                    kind = f"{type(tensor).__name__} of layout {tensor.layout}"
                    return f"{where} holds {label}, a {kind}, which cannot be compared"
    return None


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of a module itself that have no plain memory."""
    named = itertools.chain(
        module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    )
    return ((name, tensor) for name, tensor in named if not is_plain(tensor))


def prefix_content(layers: Sequence[nn.Module]) -> dict[str, str]:
    """Return what the fingerprint of layers depends on, by name, for a report.

    Returns:
        Of each attribute, parameter and buffer a text that is equal for equal contents.
    """
    texts, found = SettingsText(), {}
    for index, layer in enumerate(layers):
        texts.look_at(layer)
        for path, module in layer.named_modules():
            for name, text in _settings(module, texts):
                found[".".join((f"layer {index}", *([path] if path else []), name))] = (
                    text
                )
        tensors = itertools.chain(layer.named_parameters(), layer.named_buffers())
        for name, tensor in tensors:
            found[f"layer {index}.{name}"] = str(hash_content(tensor, 0))
    return found


def _fingerprint(layer: nn.Module, previous: int, texts: SettingsText) -> int:
    texts.look_at(layer)
    fingerprint = _C.core.hash_bytes(without_addresses(repr(layer)).encode(), previous)
    for name, module in layer.named_modules():
        settings = sorted(_settings(module, texts))
        text = f"{name}: {_class_name(module)} {settings}"
        fingerprint = _C.core.hash_bytes(text.encode(), fingerprint)
    tensors = itertools.chain(layer.named_parameters(), layer.named_buffers())
    for name, tensor in tensors:
        fingerprint = _C.core.hash_bytes(name.encode(), fingerprint)
        content = hash_content(tensor, fingerprint)
        if content is None:  # then nothing of the layer is cached, see `cacheable`
            content = _C.core.hash_bytes(str(tensor.layout).encode(), fingerprint)
        fingerprint = content
    return fingerprint


def _settings(module: nn.Module, texts: SettingsText) -> Iterator[tuple[str, str]]:
    """Attributes that ``repr`` may not show, as far as they can be told."""
    own = vars(module)
    yield from (each for each in texts.of_class(type(module)) if each[0] not in own)
    for name, value in own.items():
        if name in _MODULE_STATE:
            continue
        text = texts.of(value)
        if text is not None:
            yield name, text


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _path(layer: nn.Module, name: str, module: nn.Module) -> str:
    own = type(layer).__name__
    return f"{own}.{name}: {type(module).__name__}" if name else own
