"""Strict reading of versioned JSON objects, and their canonical bytes."""

from __future__ import annotations

import json
import reprlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from pipetransformer._extension import hash_bytes

_T = TypeVar("_T")
LARGEST_INT = 2**62
"""Of a field; the extension counts in 64 bits."""
_MOST_SECONDS = 4e9  # as nanoseconds they fit, too
LONGEST_TEXT = 4096
"""Letters of a sentence, which may quote a few names."""
LONGEST_NAME = 256

# What was read may be huge or deeply nested; an error shows its beginning.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 60
_SHORT.maxlist = _SHORT.maxtuple = 12
_SHORT.maxlevel = 3


def shown(value: object) -> str:
    """Return a value as errors show it: shortened."""
    return _SHORT.repr(value)


def canonical(value: dict[str, object]) -> str:
    """JSON text that depends on the content alone."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: dict[str, object]) -> int:
    """64-bit hash of the canonical text."""
    return hash_bytes(canonical(value).encode())


def check_int(value: object, what: str, *, low: int = 0) -> int:
    """Return ``value`` if it is an integer from ``low`` on that fits 62 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what}: expected an integer, got {shown(value)}")
    if not low <= value <= LARGEST_INT:
        raise ValueError(f"{what}: expected {low} to 2**62, got {shown(value)}")
    return value


def check_str(value: object, what: str, *, longest: int = LONGEST_TEXT) -> str:
    """Return ``value`` if it is a string that can be printed as one line.

    Args:
        value: parsed JSON.
        what: its name in errors.
        longest: letters that it may have.
    """
    if not isinstance(value, str):
        raise ValueError(f"{what}: expected a string, got {shown(value)}")
    if len(value) > longest:
        raise ValueError(
            f"{what}: expected at most {longest} letters, got {len(value)}"
        )
    # Escape sequences would reach the terminal, lone surrogates have no UTF-8.
    if not value.isprintable() and any(
        unicodedata.category(letter) in ("Cc", "Cs") for letter in value
    ):
        raise ValueError(
            f"{what}: expected text without control characters, got {shown(value)}"
        )
    return value


def printable(text: str, *, longest: int = LONGEST_TEXT) -> str:
    """Return a text from elsewhere as `check_str` takes it: one line, cut, escaped."""
    line = " ".join(text.split())[: longest + 1]
    if not line.isprintable():
        line = "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode()
            for letter in line
        )
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def check_choice(value: object, what: str, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{what}: expected one of {choices}, got {shown(value)}")
    return value


def check_fraction(value: object, what: str) -> float:
    """Return ``value`` as a float from 0 to 1."""
    if check_float(value, what) > 1:
        raise ValueError(f"{what}: expected 0 to 1, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]  # a number: checked


def check_hash(value: object, what: str) -> int:
    """Return ``value`` if it is a 64-bit hash."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what}: expected an integer, got {shown(value)}")
    if not 0 <= value < 2**64:
        raise ValueError(f"{what}: expected 0 to 2**64 - 1, got {shown(value)}")
    return value


def check_bool(value: object, what: str) -> bool:
    """Return ``value`` if it is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{what}: expected true or false, got {shown(value)}")
    return value


def check_float(value: object, what: str) -> float:
    """Return ``value`` as a float from 0 to 2**62."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what}: expected a number, got {shown(value)}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{what}: expected a finite number from 0, got {shown(value)}")
    if value > LARGEST_INT:  # an int may be too large for a float
        raise ValueError(f"{what}: expected at most 2**62, got {shown(value)}")
    return float(value)


def check_seconds(value: object, what: str) -> float:
    """Return ``value`` if it is a number of seconds: finite, from 0 on."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value < _MOST_SECONDS
    ):
        raise ValueError(f"{what}: expected seconds from 0, got {shown(value)}")
    return value


def check_tuple(
    value: object, what: str, item: Callable[[object, str], _T]
) -> tuple[_T, ...]:
    """Return a list or tuple as a tuple of checked items."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what}: expected a list, got {shown(value)}")
    return tuple(item(entry, f"{what}[{i}]") for i, entry in enumerate(value))


def check_ints(value: object, what: str) -> tuple[int, ...]:
    """Return a list or tuple of integers from 0 on as a tuple."""
    return check_tuple(value, what, check_int)


def check_mapping(
    value: object, what: str, item: Callable[[object, str], _T]
) -> dict[str, _T]:
    """Return an object of checked items by names that can be printed."""
    found = check_object(value, what)
    for name in found:
        check_str(name, f"{what}, name of a field", longest=LONGEST_NAME)
    return {name: item(entry, f"{what} {name}") for name, entry in found.items()}


def check_object(value: object, what: str) -> dict[str, object]:
    """Return ``value`` if it is an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, got {type(value).__name__}")
    return value


class Fields:
    """The fields of a JSON object that may have others, too.

    Args:
        value: parsed JSON.
        what: name of the object in errors; a field's is that and its own.

    Raises:
        ValueError: not an object. So do the methods, of a field that is missing and
            has no default, or is not what was asked for.
    """

    def __init__(self, value: object, what: str) -> None:
        self._values = check_object(value, what)
        self._what = what

    def read(
        self, name: str, check: Callable[[object, str], _T], default: object = None
    ) -> _T:
        """Return a field as ``check`` gives it."""
        return check(self._values.get(name, default), f"{self._what} {name}")

    def read_or_none(self, name: str, check: Callable[[object, str], _T]) -> _T | None:
        """Return a field as ``check`` gives it; None if it is null or missing."""
        return None if self._values.get(name) is None else self.read(name, check)

    def read_tuple(
        self, name: str, item: Callable[[object, str], _T], default: object = None
    ) -> tuple[_T, ...]:
        """Return a list as `check_tuple` does."""
        return self.read(name, partial(check_tuple, item=item), default)

    def read_mapping(
        self, name: str, item: Callable[[object, str], _T]
    ) -> dict[str, _T]:
        """Return an object as `check_mapping` does; an empty one if it is missing."""
        return self.read(name, partial(check_mapping, item=item), {})


def read_object(
    value: object,
    what: str,
    *,
    required: Iterable[str],
    optional: Iterable[str] = (),
    version: int | None = None,
) -> dict[str, object]:
    """Check the keys of a JSON object.

    Args:
        value: parsed JSON.
        what: name of the object in errors.
        required: keys that must be there, ``version`` aside.
        optional: keys that may be there.
        version: expected value of the key ``version``, if the object has one.

    Returns:
        The object without ``version``.

    Raises:
        ValueError: not an object, another version, a missing or unknown key.
    """
    fields = dict(check_object(value, what))
    if version is not None:
        found = fields.pop("version", None)
        if type(found) is not int or found != version:
            raise ValueError(f"{what} version: expected {version}, got {shown(found)}")
    needed = list(required)
    for key in needed:
        if key not in fields:
            raise ValueError(f"{what} {key}: expected a value, got none")
    known = {*needed, *optional}
    for key in fields:
        if key not in known:
            raise ValueError(f"{what}: expected known fields only, got {shown(key)}")
    return fields


def parse(text: str, what: str) -> object:
    """Parse JSON text; malformed text is a ValueError that names ``what``."""
    if not isinstance(text, str):
        raise TypeError(f"{what}: expected JSON text, got {type(text).__name__}")
    try:
        parsed: object = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: expected JSON, got text with {error}") from None
    return parsed


def _object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {shown(key)} twice")
        fields[key] = value
    return fields


def _refuse(constant: str) -> object:
    raise ValueError(f"the number {constant}")
