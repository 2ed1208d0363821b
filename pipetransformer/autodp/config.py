"""Deadlines and sizes of the control plane and the active groups."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Literal, get_args

from pipetransformer.autodp.secret import Secret, check_secret

FailurePolicy = Literal["raise", "continue"]
"""What the ranks that are left do when one is lost."""

_SHORTEST = timedelta(milliseconds=1)
_LONGEST = timedelta(days=365)  # clocks count nanoseconds in 64 bits
_LARGEST_BUFFER = 1 << 32
_PATH_BEGINS = ("/", "~", "./", "../")
_RUN_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclass(frozen=True, kw_only=True)
class AutoDPConfig:
    """How long this room waits, and for what.

    Args:
        heartbeat_interval: time between two signs of life of a rank.
        heartbeat_timeout: a rank without a sign of life for so long is dead; at
            least three intervals.
        store_timeout: how long ranks wait at start for the store, and for ranks that
            have not joined (at least 10 minutes where ``torchrun`` started them, which
            ends all when one dies); of those that have, heartbeats tell. A store that
            was reached may stall for half of it, or for heartbeat_timeout if that is
            longer, until all have joined.
        protocol_timeout: deadline of each step of a transformation.
        group_timeout: deadline of one collective; heartbeats find the dead long
            before, so it only has to exceed what one rank may do alone.
        transfer_bucket_bytes: most bytes of small tensors that are moved together,
            1 to 2**32.
        cached_groups: groups of earlier plans that are kept connected, for a plan
            with the same ranks in the same order; 0: none.
        interface: network interface of the CPU groups, such as ``"eth0"``; may
            differ between ranks. None: ``GLOO_SOCKET_IFNAME`` if it is set, else the
            one towards the store.
        run_name: tells apart jobs that share a store; equal on all ranks of a job.
        on_peer_failure: ``"raise"`` ends all ranks when one is lost;
            ``"continue"`` lets the survivors go on without it, if their launcher
            leaves them alone: ``torchrun`` ends all its workers when one dies, and
            with one per node it needs ``--max-restarts=0``, or those of the other
            nodes start theirs anew. Equal on all ranks.
        secret: what only this run's ranks know, 16 to 4096 bytes; equal on all of
            them. With it, messages of anybody else on the store are ignored: see
            "Trust" in ``docs/protocol.md``. A `pathlib.Path` names a file of mode
            0600 that holds it; rank 0 makes one that is not there. A str is the
            secret itself, and refused if it begins as a path. None: the environment's
            ``PIPETRANSFORMER_SECRET``, else the file that
            ``PIPETRANSFORMER_SECRET_FILE`` names, else none. Never shown.

    Raises:
        TypeError: a duration that is no `timedelta`, or a value of another wrong type.
        ValueError: a duration that is not from a millisecond to a year, a size out of
            range, a heartbeat timeout below three intervals, a name of other
            characters, an unknown policy, or a secret that is too short, too long or
            looks like the name of a file.
    """

    heartbeat_interval: timedelta = timedelta(seconds=1)
    heartbeat_timeout: timedelta = timedelta(seconds=10)
    store_timeout: timedelta = timedelta(seconds=30)
    protocol_timeout: timedelta = timedelta(seconds=30)
    group_timeout: timedelta = timedelta(minutes=10)
    transfer_bucket_bytes: int = 64 << 20
    cached_groups: int = 4
    interface: str | None = None
    run_name: str = ""
    on_peer_failure: FailurePolicy = "raise"
    secret: Secret = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "timedelta":
                _check_duration(each.name, value)
            elif each.type == "int" and type(value) is not int:
                raise TypeError(f"{each.name}: expected an int, got {value!r}")
            elif each.name == "secret":
                _check_secret(self.secret)
            elif str(each.type).startswith("str") and not isinstance(value, str | None):
                raise TypeError(f"{each.name}: expected a str, got {value!r}")
        if self.heartbeat_timeout < 3 * self.heartbeat_interval:
            raise ValueError(
                "heartbeat_timeout: expected at least three heartbeat intervals of "
                f"{self.heartbeat_interval}, got {self.heartbeat_timeout}"
            )
        if not 0 < self.transfer_bucket_bytes <= _LARGEST_BUFFER:
            raise ValueError(
                "transfer_bucket_bytes: expected a number from 1 to 2**32, got "
                f"{self.transfer_bucket_bytes}"
            )
        if self.cached_groups < 0:
            raise ValueError(
                f"cached_groups: expected a number from 0, got {self.cached_groups}"
            )
        if self.interface == "":
            raise ValueError("interface: expected a name or None, got ''")
        if self.run_name is None or not _RUN_NAME.fullmatch(self.run_name):
            raise ValueError(
                "run_name: expected at most 64 letters, digits, '.', '_' and '-', got "
                f"{self.run_name!r}"
            )
        if self.on_peer_failure not in get_args(FailurePolicy):
            raise ValueError(
                "on_peer_failure: expected one of "
                f"{', '.join(map(repr, get_args(FailurePolicy)))}, got "
                f"{self.on_peer_failure!r}"
            )


def _check_secret(secret: Secret) -> None:
    if isinstance(secret, str | bytes):
        data = secret if isinstance(secret, bytes) else secret.encode(errors="replace")
        check_secret(data, "secret")
        if isinstance(secret, str) and secret.startswith(_PATH_BEGINS):
            raise ValueError(
                "secret: expected the secret itself as a str or bytes, or its file as "
                "a pathlib.Path, got a str that begins as a path (one that is none: "
                "give its bytes)"
            )
    elif not isinstance(secret, os.PathLike | None):
        raise TypeError(
            f"secret: expected str, bytes or a path, got {type(secret).__name__}"
        )


def _check_duration(name: str, value: object) -> None:
    if not isinstance(value, timedelta):
        raise TypeError(f"{name}: expected a timedelta, got {value!r}")
    if value < _SHORTEST:
        raise ValueError(f"{name}: expected at least a millisecond, got {value}")
    if value > _LONGEST:
        raise ValueError(f"{name}: expected at most a year, got {value}")
