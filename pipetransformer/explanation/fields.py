"""Reads values of parsed JSON, naming the field that is wrong."""

from __future__ import annotations

from collections.abc import Mapping

from pipetransformer.core.wire import LONGEST_NAME, check_str

_LARGEST_INT = 2**62
_MOST_SECONDS = 4e9


def read_mapping(value: object, what: str) -> Mapping[str, object]:
    """Return ``value`` if it is an object whose names can be printed."""
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, got {_shown(value)}")
    for name in value:
        check_str(name, f"{what}, name of a field", longest=LONGEST_NAME)
    return value


def read_list(value: object, what: str) -> list[object]:
    """Return ``value`` if it is a list."""
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, got {_shown(value)}")
    return value


def read_count(value: object, what: str) -> int:
    """Return ``value`` if it is an integer from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what}: expected an integer, got {_shown(value)}")
    if not 0 <= value <= _LARGEST_INT:
        raise ValueError(f"{what}: expected 0 to 2**62, got {_shown(value)}")
    return value


def read_seconds(value: object, what: str) -> int:
    """Return seconds, a finite number from 0 on, as whole nanoseconds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value < _MOST_SECONDS
    ):
        raise ValueError(f"{what}: expected seconds from 0, got {_shown(value)}")
    return round(value * 1_000_000_000)


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return type(value).__name__
    return repr(value)[:80]
