"""Who is on a store: each rank leaves a card, so that strangers can be told apart.

Cards are not sealed: a rank without the run's secret reads them, too, and who can
write to the store can forge them. They explain why ranks do not meet, and what people
are warned of, and decide nothing else.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from pipetransformer import _C

_LONGEST = 4096  # bytes of a card
_LONGEST_TEXT = 200  # bytes of one of its texts
_ABSENT = "\x01 absent"  # no card


@dataclass(frozen=True)
class Job:
    """What tells one job on a store from another.

    Args:
        world_size: Number of its ranks.
        launch: The launcher's name for it (``TORCHELASTIC_RUN_ID``), or empty.
        run_name: ``AutoDPConfig.run_name``.
        sealed: Whether its messages carry a seal.
    """

    world_size: int
    launch: str
    run_name: str
    sealed: bool

    @classmethod
    def here(
        cls, world_size: int, run_name: str, environ: Mapping[str, str], *, sealed: bool
    ) -> Job:
        """Return this process's job."""
        launch = environ.get("TORCHELASTIC_RUN_ID", "")
        launch = _C.core.plain_text(os.fsencode(launch), _LONGEST_TEXT)
        return cls(world_size, launch, run_name, sealed)

    def launched(self) -> tuple[int, str]:
        """Return what is equal for all engines of a process."""
        return self.world_size, self.launch

    def __str__(self) -> str:
        named = f" of run '{self.run_name}'" if self.run_name else ""
        launched = f" launched as '{self.launch}'" if self.launch else ""
        return (
            f"{self.world_size} ranks{named}{launched}, "
            f"{'with' if self.sealed else 'without'} a secret"
        )


@dataclass(frozen=True)
class Card:
    """What a rank says of itself.

    Args:
        job: Its job.
        host: Name of its machine.
        pid: Its process.
    """

    job: Job
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on '{self.host}', a job of {self.job}"

    def encode(self) -> str:
        """Return the card as the store holds it."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Card | None:
        """Return the card that others wrote, None if they wrote something else."""
        if len(data) > _LONGEST:
            return None
        try:
            content = json.loads(data)
            told = content["job"]
            job = Job(
                _count(told["world_size"]),
                _text(told["launch"]),
                _text(told["run_name"]),
                told["sealed"] is True,
            )
            return cls(job, _text(content["host"]), _count(content["pid"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"card: expected a count, got {value!r:.80}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"card: expected a text, got {value!r:.80}")
    return _C.core.plain_text(value.encode(errors="replace"), _LONGEST_TEXT)


class Cards:
    """The cards on one store.

    Args:
        store: All keys, without a seal.
        rank: This rank.
        job: Its job.
        ours: Whether a rank of this job must serve the store.
    """

    def __init__(self, store: Store, rank: int, job: Job, *, ours: bool) -> None:
        self._store = store
        self._rank = rank
        self._job = job
        self._ours = ours
        host = _C.core.plain_text(os.fsencode(socket.gethostname()), _LONGEST_TEXT)
        store.set(self._key(rank), Card(job, host, os.getpid()).encode())

    def refusal(self) -> str | None:
        """Return why this rank is at another job's store, None if it is not known.

        Who has a secret believes no card at once: anybody may have written it.
        """
        believed = self._ours and not self._job.sealed
        card = self._card_of(0) if believed else None
        # Only what holds for a process: its engines one after the other may differ.
        if card is None or card.job.launched() == self._job.launched():
            return None
        return (
            f"the store is another job's: expected rank 0 of {self._job}, got {card}; "
            "jobs on one machine need a MASTER_PORT each"
        )

    def apart(self) -> str | None:
        """Return the host of rank 0 if it is known, and another than this rank's."""
        own, first = self._card_of(self._rank), self._card_of(0)
        if own is None or first is None or own.host == first.host:
            return None
        return first.host

    def hint(self, absent: Sequence[int]) -> str:
        """Return what is known of ranks that did not join, for people; may be empty."""
        for rank in absent:
            card = self._card_of(rank)
            if card is None:
                continue
            if card.job != self._job:
                return f"; on this store rank {rank} is {card}, not of {self._job}"
            if self._job.sealed:
                return f"; rank {rank} is {card}: is it the same one?"
        return ""

    def _card_of(self, rank: int) -> Card | None:
        # Never waits, also if somebody removes the card at this moment.
        found = bytes(self._store.compare_set(self._key(rank), _ABSENT, _ABSENT))
        return None if found == _ABSENT.encode() else Card.decode(found)

    def _key(self, rank: int) -> str:
        return f"pt/card/{rank}"
