"""Whether settings and arguments are of the kinds that were asked for."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES = {int: "an int", float: "a number", bool: "a bool", str: "a str"}


def settle_kinds(settings: object) -> None:
    """Refuse a value that is of another kind than its field's annotation says.

    Numbers of numpy count as numbers, bools do not. What a Literal allows is not
    looked at: a message that lists its values says more. The others become plain
    values, so that equal settings are equal: Python's numbers, tuples, texts.

    Args:
        settings: A dataclass instance.

    Raises:
        TypeError: naming class, field, kinds and value.
    """
    name = type(settings).__name__
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value, hint = getattr(settings, field.name), hints[field.name]
        if not _fits(value, hint):
            raise TypeError(
                f"{name}.{field.name}: expected {_told(hint)}, got {value!r}"
            )
        object.__setattr__(settings, field.name, _plain(value))


def check_count(what: str, value: Any, *, least: int = 1) -> int:
    """Return an argument that counts something as an int.

    Args:
        what: Its name.
        value: What the user passed.
        least: It is at least this.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below `least`.
    """
    if not _fits(value, int):
        raise TypeError(f"{what}: expected an int, got {value!r}")
    if value < least:
        raise ValueError(f"{what}: expected at least {least}, got {value}")
    return int(value)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return True
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Sequence:
        inner = get_args(hint)[0]
        return isinstance(value, Sequence) and all(_fits(v, inner) for v in value)
    if hint is int or hint is float:
        kind = Integral if hint is int else Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence):
        return tuple(_plain(each) for each in value)
    return value


def _told(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_told(each) for each in get_args(hint))
    if get_origin(hint) is Sequence:
        return f"a sequence of {get_args(hint)[0].__name__}s"
    if hint is type(None):
        return "None"
    if get_origin(hint) is os.PathLike:
        return "a path"
    name = str(getattr(hint, "__name__", hint))
    return _NAMES.get(hint, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
