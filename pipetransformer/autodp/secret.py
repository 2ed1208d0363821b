"""What only the ranks of a run know: found where its user put it, or made there."""

from __future__ import annotations

import os
import pathlib
import secrets
import stat
import time
from collections.abc import Callable, Mapping

from pipetransformer.core import disk

SECRET_VARIABLE = "PIPETRANSFORMER_SECRET"
"""Environment variable that holds the secret itself."""
SECRET_FILE_VARIABLE = "PIPETRANSFORMER_SECRET_FILE"
"""Environment variable that names the file which holds it."""

LEAST_BYTES, MOST_BYTES = 16, 4096
_POLL_S = 0.1

Secret = str | bytes | os.PathLike[str] | None


def check_secret(secret: bytes, what: str) -> bytes:
    """Return a secret of allowed length; errors never quote it.

    Raises:
        ValueError: fewer than 16 bytes or more than 4096.
    """
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise ValueError(
            f"{what}: expected {LEAST_BYTES} to {MOST_BYTES} bytes, got {len(secret)}"
        )
    return secret


def find_secret(
    secret: Secret,
    environ: Mapping[str, str],
    *,
    makes: bool,
    deadline: float,
    given_up: Callable[[], bool] = lambda: False,
) -> bytes | None:
    """Return the run's secret, None where there is none.

    The setting counts, else ``PIPETRANSFORMER_SECRET``, else the file that
    ``PIPETRANSFORMER_SECRET_FILE`` names.

    Args:
        secret: ``AutoDPConfig.secret``: the secret itself, or the path of its file.
        environ: The environment.
        makes: Whether this rank writes the file if it is not there: 32 random bytes
            as hexadecimal digits, mode 0600. Other ranks wait for it.
        deadline: Until when, as ``time.monotonic()``.
        given_up: Whether nobody waits for the result any more.

    Raises:
        ValueError: the secret is too short or too long; the file is no regular one,
            belongs to another user, or others may read or write it.
        TimeoutError: no file by the deadline.
        OSError: the file could not be read or made.
    """
    if secret is None:
        text = environ.get(SECRET_VARIABLE, "")
        if text:
            return check_secret(text.encode(errors="surrogateescape"), SECRET_VARIABLE)
        name = environ.get(SECRET_FILE_VARIABLE, "")
        if not name:
            return None
        secret, what = pathlib.Path(name), SECRET_FILE_VARIABLE
    else:
        what = "secret"
    if isinstance(secret, str):
        secret = secret.encode(errors="surrogateescape")
    if isinstance(secret, bytes):
        return check_secret(secret, what)
    path = pathlib.Path(secret)
    while True:
        try:
            return _read(path, what)
        except FileNotFoundError:
            if makes:
                _make(path)
                makes = False  # a link that leads nowhere is not replaced
                continue
            if given_up() or time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{what}: expected the file {path}, which rank 0 makes where it "
                    "is missing, got none"
                ) from None
        time.sleep(_POLL_S)


def _read(path: pathlib.Path, what: str) -> bytes:
    name = f"{what}: {path}"
    with disk.reading(path, name) as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.geteuid():
            raise ValueError(
                f"{name}: expected a file of user {os.geteuid()}, got one of user "
                f"{info.st_uid}"
            )
        if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(
                f"{name}: expected mode 0600, got {stat.S_IMODE(info.st_mode):04o}"
            )
        return check_secret(file.read(MOST_BYTES + 2).strip(), name)


def _make(path: pathlib.Path) -> None:
    with disk.replacing(path, replace=False) as file:
        file.write(secrets.token_hex(32).encode() + b"\n")
