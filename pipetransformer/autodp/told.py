"""Reads JSON that a rank wrote into the store, where others can write, too."""

from __future__ import annotations

import json
from typing import Any

from pipetransformer import _C

_LONGEST_QUOTE = 80  # bytes


def read_json(data: bytes, what: str) -> Any:
    """Return what the bytes hold.

    Args:
        data: A value of the store.
        what: Its name, for the error's text.

    Raises:
        RuntimeError: it is no JSON; says so in one printable line.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise RuntimeError(
            f"{what}: expected JSON that a rank wrote, got {_quoted(data)}"
        ) from None


def read_fields(data: bytes, what: str) -> dict[str, Any]:
    """Return the fields of the object that the bytes hold; errors as `read_json`'s.

    So is that of a field which is asked for and is not there.
    """
    content = read_json(data, what)
    if not isinstance(content, dict):
        raise RuntimeError(f"{what}: expected an object, got {_quoted(data)}")
    return _Fields(content, data, what)


class _Fields(dict[str, Any]):
    def __init__(self, content: dict[str, Any], data: bytes, what: str) -> None:
        super().__init__(content)
        self._data = data
        self._what = what

    def __missing__(self, name: str) -> Any:
        raise RuntimeError(
            f"{self._what}: expected the field '{name}', got {_quoted(self._data)}"
        )


def _quoted(data: bytes) -> str:
    return f"'{_C.core.plain_text(data, _LONGEST_QUOTE)}'"
