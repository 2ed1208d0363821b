"""Settings of layers as text: equal in every process for equal settings.

What a frozen layer computes depends on what its attributes hold: numbers, but also
objects with numbers in them, arrays and functions. What cannot be told apart by its
content is left out, since an address or the number of an object differs from run to
run, and records that are kept would never be found again.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import datetime
import decimal
import fractions
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from multiprocessing import sharedctypes
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer import _C
from pipetransformer.autocache.content import hash_content, without_addresses

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, type(...)),
    *(torch.dtype, torch.Size, pathlib.PurePath),
    *(fractions.Fraction, decimal.Decimal, array.array, bytearray),
    datetime.timedelta,  # no moments: they tell when something was made
)
_CONTAINERS = (dict, list, set, collections.deque, Tensor, nn.Module)
# Objects of these change as a run goes on (loggers, handles of hooks), or hold nothing
# that can be told (locks, streams). Values of ctypes do.
_OPAQUE = sys.stdlib_module_names | {"torch"}
_DEEPEST = 12
# Of configs of models and launchers: where a model came from, and what its layers do
# not read.
_NO_SETTINGS = frozenset(
    (
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
        *("use_cache", "local_rank"),
    )
)


class SettingsText:
    """Makes the texts of one fingerprint; each object is looked at once.

    Attributes:
        layer: The layer that is looked at. Modules that it reaches without holding
            them as its own are told by their weights, unless they hold the layer: such
            a one may be the model, whose other weights train.
    """

    def __init__(self) -> None:
        self.layer: nn.Module | None = None
        self._reached = False  # a module was met, whose text depends on the layer
        self._classes: dict[type, list[tuple[str, str]]] = {}
        self._known: dict[int, str | None] = {}
        self._held: list[object] = []  # else another object could get an id of theirs
        self._depth = 0

    def look_at(self, layer: nn.Module) -> None:
        """Go on with another layer."""
        if self._reached:
            self._known.clear()
            self._reached = False
        self.layer = layer

    def of(self, value: object) -> str | None:
        """Return the text of a value; None: it cannot be told."""
        if isinstance(value, Enum):
            return without_addresses(repr(value))
        if isinstance(value, _PLAIN):
            return repr(value)
        known = self._known
        if id(value) in known:
            return known[id(value)]
        if self._depth >= _DEEPEST:
            return None
        known[id(value)] = "itself"  # while it is looked at: it may hold itself
        self._held.append(value)
        self._depth += 1
        try:
            text = self._content(value)
        finally:
            self._depth -= 1
        if text is not None and len(text) > 64:  # others may have it in theirs, too
            text = f"{_C.core.hash_bytes(text.encode()):016x}"
        known[id(value)] = text
        return text

    def _content(self, value: object) -> str | None:
        if isinstance(value, Tensor):
            content = hash_content(value, 0)
            return None if content is None else str(content)
        if isinstance(value, (list, tuple, collections.deque)):
            return repr([self.of(item) for item in value])
        if isinstance(value, (set, frozenset)):
            return repr(sorted(str(self.of(item)) for item in value))
        if isinstance(value, dict):
            return self._pairs(value.items())
        if isinstance(value, type):
            return _name_of(value) + str(self.of_class(value) or "")
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if callable(value):
            text = self._of_callable(value)
            if text is not None:
                return text
        if isinstance(value, sharedctypes.SynchronizedBase):
            return self.of(value.get_obj())
        if isinstance(value, ctypes._SimpleCData):
            return f"{_name_of(type(value))} {value.value!r}"
        if isinstance(value, ctypes.Array):
            return f"{_name_of(type(value))} {[self.of(item) for item in value]}"
        if isinstance(value, ctypes.Structure):
            names = (name for name, *_ in type(value)._fields_)
            held = ((name, getattr(value, name)) for name in names)
            return f"{_name_of(type(value))} {self._pairs(held)}"
        return self._of_array(value) or self._of_object(value)

    def _pairs(self, pairs: Iterable[tuple[object, object]]) -> str:
        # In any order: tables that fill as batches come have one of their own.
        told = [(self.of(name), self.of(value)) for name, value in pairs]
        return repr(sorted(told, key=repr))

    def _of_callable(self, value: Callable[..., Any]) -> str | None:
        if isinstance(value, FunctionType):
            # Lambdas have one name; what is kept may be of another version of it.
            given = value.__defaults__, value.__kwdefaults__, value.__closure__
            parts = [self._of_code(value.__code__), *map(self.of, given)]
            return f"{_name_of(value)} {parts}"
        if isinstance(value, BuiltinFunctionType):
            return _name_of(value)
        if isinstance(value, MethodType):
            return repr([self.of(value.__func__), self.of(value.__self__)])
        if isinstance(value, functools.partial):
            parts = [self.of(each) for each in (value.func, value.args, value.keywords)]
            return f"partial {parts}"
        return None

    def _of_code(self, code: CodeType) -> str:
        constants = [
            self._of_code(each) if isinstance(each, CodeType) else self.of(each)
            for each in code.co_consts
        ]
        return repr([code.co_code, code.co_names, constants])

    def _of_array(self, value: Any) -> str | None:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
            return None
        if value.dtype.hasobject:
            return repr(self.of(value.tolist()))
        content = _C.core.hash_bytes(value.tobytes())
        return f"{value.dtype} {value.shape} {content:016x}"

    def _of_object(self, value: object) -> str | None:
        if isinstance(value, CellType):
            try:
                return self.of(value.cell_contents)
            except ValueError:  # it is empty
                return None
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        opaque = type(value).__module__.partition(".")[0] in _OPAQUE
        if opaque and not fields and not isinstance(value, SimpleNamespace):
            return None
        held = getattr(value, "__dict__", None)
        if not fields and not isinstance(held, dict):
            return None
        names = (field.name for field in fields)
        told = {name: getattr(value, name) for name in names if hasattr(value, name)}
        every = {**told, **(held or {})}
        kept = ((n, each) for n, each in every.items() if n not in _NO_SETTINGS)
        shared = self.of_class(type(value))
        return f"{_name_of(type(value))}{self._pairs(kept)}{shared or ''}"

    def of_class(self, kind: type) -> list[tuple[str, str]]:
        """Return the settings that a class and its bases hold, by name, as texts.

        Plain values, tuples of such, and other classes and objects that hold some. No
        methods, and no lists and dicts: those of a class are caches and registries,
        which grow as others use the class. Classes of Python and torch hold nothing.
        """
        known = self._classes
        if kind not in known:
            known[kind] = []  # while it is looked at
            known[kind] = self._class_settings(kind)
        return known[kind]

    def _class_settings(self, kind: type) -> list[tuple[str, str]]:
        if issubclass(kind, Enum):
            return []
        held: dict[str, str] = {}
        for base in reversed(kind.__mro__):
            if str(base.__module__).partition(".")[0] in _OPAQUE:
                continue
            for name, value in list(vars(base).items()):
                if name.startswith("__") or not _is_setting(value):
                    continue
                text = None if name in _NO_SETTINGS else self.of(value)
                held[name] = text or ""
        return sorted((name, text) for name, text in held.items() if text)

    def _of_module(self, module: nn.Module) -> str | None:
        layer, self._reached = self.layer, True
        if layer is None or any(part is layer for part in module.modules()):
            return None
        if any(part is module for part in layer.modules()):
            return None  # counted with the layer
        content = 0
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            content = hash_content(tensor, content) or content
        return f"{_name_of(type(module))} {content:016x}"


def _is_setting(held: object) -> bool:
    """Tell whether what a class holds is a setting: no method, cache or registry."""
    if isinstance(held, (type, Enum, *_PLAIN)):
        return True
    if isinstance(held, (tuple, frozenset)):
        return all(map(_is_setting, held))
    is_method = callable(held) or hasattr(type(held), "__get__")
    return not is_method and not isinstance(held, _CONTAINERS)


def _name_of(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"
