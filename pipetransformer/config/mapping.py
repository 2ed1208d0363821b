"""Settings as nested mappings of plain values, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from numbers import Real
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")

_UNWRITTEN = "secret"


def to_mapping(settings: object) -> dict[str, Any]:
    """Return a dataclass's fields as values that JSON, YAML and TOML can hold.

    Durations are seconds, tuples lists, dataclasses mappings. What is None and what is
    secret is left out.
    """
    found = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        if value is None or field.name == _UNWRITTEN:
            continue
        if dataclasses.is_dataclass(value):
            value = to_mapping(value)
        elif isinstance(value, timedelta):
            value = value.total_seconds()
        elif isinstance(value, tuple):
            value = list(value)
        found[field.name] = value
    return found


def from_mapping(kind: type[T], mapping: Any, path: str) -> T:
    """Make a dataclass from what `to_mapping` gives, or from a part of it.

    Args:
        kind: The dataclass.
        mapping: Values by the names of its fields.
        path: Names the mapping in errors.

    Raises:
        TypeError: a value of a wrong kind; names its path.
        ValueError: an unknown name, a value out of range, or a secret.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{path}: expected a mapping, got {mapping!r}")
    hints = get_type_hints(kind)
    given = {}
    for name, value in mapping.items():
        where = f"{path}.{name}"
        if name == _UNWRITTEN and name in hints:
            raise ValueError(
                f"{where}: expected it in the environment or as an argument of "
                f"{kind.__name__}, got one in a mapping"
            )
        if name not in hints:
            known = sorted(set(hints) - {_UNWRITTEN})
            raise ValueError(
                f"{where}: expected one of {', '.join(known)}, got an unknown name"
            )
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            value = from_mapping(hint, value, where)  # type: ignore[arg-type]
        elif hint is timedelta:
            value = _duration(value, where)
        given[name] = value
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix(f"{kind.__name__}.")
        raise type(error)(f"{path}.{text}") from None


def _duration(seconds: Any, where: str) -> timedelta:
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise TypeError(f"{where}: expected a number of seconds, got {seconds!r}")
    try:
        return timedelta(seconds=float(seconds))
    except (OverflowError, ValueError):  # too many, or nan
        raise ValueError(
            f"{where}: expected at most a year of seconds, got {seconds!r}"
        ) from None
