"""What a run did: all records and counts; JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from pipetransformer.core import disk, text_files
from pipetransformer.report.codecs import CodecRecord
from pipetransformer.report.counters import Counters
from pipetransformer.report.ending import Ending
from pipetransformer.report.epochs import EpochRecord
from pipetransformer.report.saved import Saved, saved_by_freezing
from pipetransformer.report.transformations import (
    AbortRecord,
    RecoveryRecord,
    RefusalRecord,
    TransformationRecord,
)

_VERSION = 1


@dataclasses.dataclass
class History:
    """The records of one run, complete on the lead.

    A rank that became the lead because the one before was lost has the records of all
    passes, and of the changes of plan that it was active in: the first may be missing.

    Attributes:
        world_size: Processes.
        seed: Seed of the run.
        epochs: One record per finished pass.
        first_plan: How the run began.
        transformations: Changes of plan after the first.
        refusals: Changes that were priced and not taken.
        aborted: Attempts that ended in ABORT, retries among them.
        recoveries: Losses of ranks that the run survived.
        codecs: Decisions on the codec of cached activations, of this rank.
        freezes: The boundary's history: units, boundary, epoch and step of each change.
        decisions: Of the freeze policy: point, step, statistics, units and why.
        counters: See `Counters`.
        total_seconds: Wall time from opening to closing the engine.
        phase_seconds: The lead's wall time by phase, see `Clock`; it adds up to the
            total.
        ended: How the run ended; None while it goes on.
    """

    world_size: int
    seed: int
    epochs: list[EpochRecord] = dataclasses.field(default_factory=list)
    first_plan: TransformationRecord | None = None
    transformations: list[TransformationRecord] = dataclasses.field(
        default_factory=list
    )
    refusals: list[RefusalRecord] = dataclasses.field(default_factory=list)
    aborted: list[AbortRecord] = dataclasses.field(default_factory=list)
    recoveries: list[RecoveryRecord] = dataclasses.field(default_factory=list)
    codecs: list[CodecRecord] = dataclasses.field(default_factory=list)
    freezes: list[dict[str, int]] = dataclasses.field(default_factory=list)
    decisions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    counters: Counters = dataclasses.field(default_factory=Counters)
    total_seconds: float = 0.0
    phase_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: Ending | None = None

    def add(self, record: TransformationRecord) -> None:
        """Append a transformation; one without a plan before it is the first plan."""
        if record.before is None:
            self.first_plan = record
        else:
            self.transformations.append(record)

    @property
    def cache(self) -> list[dict[str, int]]:
        """What the cache did in each pass: hits, misses and `EpochRecord.cache`."""
        return [
            {"hits": each.cache_hits, "misses": each.cache_misses, **each.cache}
            for each in self.epochs
        ]

    @property
    def final_accuracy(self) -> float | None:
        """The last epoch's metric named ``accuracy``."""
        return self.epochs[-1].metrics.get("accuracy") if self.epochs else None

    @property
    def freezing(self) -> Saved | None:
        """What freezing has saved so far; None where nothing can be compared."""
        return saved_by_freezing(self.epochs, self.transformations)

    def to_json(self) -> dict[str, Any]:
        """Return the whole history in the summary's format."""
        saved = self.freezing
        return {
            "version": _VERSION,
            "world_size": self.world_size,
            "seed": self.seed,
            "first_plan": (
                self.first_plan.to_json() if self.first_plan is not None else None
            ),
            "epochs": [record.to_json() for record in self.epochs],
            "transformations": [record.to_json() for record in self.transformations],
            "refusals": [record.to_json() for record in self.refusals],
            "aborted": [record.to_json() for record in self.aborted],
            "recoveries": [record.to_json() for record in self.recoveries],
            "codecs": [record.to_json() for record in self.codecs],
            "freezes": [dict(entry) for entry in self.freezes],
            "decisions": self.decisions,
            "freezing": None if saved is None else saved.to_json(),
            "counters": self.counters.to_json(),
            "final_accuracy": self.final_accuracy,
            "total_seconds": self.total_seconds,
            "phase_seconds": self.phase_seconds,
            "ended": None if self.ended is None else self.ended.to_json(),
        }


def write_summary(history: History, path: str | os.PathLike[str]) -> None:
    """Write the history as JSON: temporary file, fsync, rename; mode 0600.

    A symbolic link of that name is replaced, and not followed.

    Args:
        history: A finished or running history.
        path: The file; its folder is made when missing.

    Raises:
        TypeError: no history.
        OSError: the file could not be written; what is there is whole.
    """
    if not isinstance(history, History):
        raise TypeError(
            f"history: expected engine.history, got {type(history).__name__}"
        )
    target = pathlib.Path(path)
    disk.make_folder(target.parent)
    text = json.dumps(_finite(history.to_json()), indent=1, allow_nan=False)
    text_files.replace(target, f"{text}\n")


def _finite(value: Any) -> Any:
    """Return `value` with None for what is no finite number: JSON has no such ones."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
