"""Reads values of parsed JSON, naming the field that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping


def read_mapping(value: object, what: str) -> Mapping[str, object]:
    """Return ``value`` if it is an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, got {_shown(value)}")
    return value


def read_list(value: object, what: str) -> list[object]:
    """Return ``value`` if it is a list."""
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, got {_shown(value)}")
    return value


def read_text(value: object, what: str) -> str:
    """Return ``value`` if it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{what}: expected a string, got {_shown(value)}")
    return value


def read_count(value: object, what: str) -> int:
    """Return ``value`` if it is an integer from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what}: expected an integer from 0, got {_shown(value)}")
    return value


def read_seconds(value: object, what: str) -> int:
    """Return seconds, a finite number from 0 on, as whole nanoseconds."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0:  # type: ignore[arg-type]
        raise ValueError(f"{what}: expected seconds from 0, got {_shown(value)}")
    return round(value * 1_000_000_000)  # type: ignore[operator]


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return type(value).__name__
    return repr(value)[:80]
