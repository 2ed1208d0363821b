"""What freezing has saved so far, by the run's own clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pipetransformer.core.wire import Fields, check_seconds
from pipetransformer.report.epochs import EpochRecord
from pipetransformer.report.transformations import TransformationRecord

_LEAST_STEPS = 10  # fewer tell little


@dataclasses.dataclass(frozen=True)
class Saved:
    """Steps with frozen units, compared with those of the same run before.

    Attributes:
        seconds: What the steps with frozen units took less than as many without;
            negative if they took more, as while the cache is filled. Changes of plan
            and evaluations are not in it.
        pause_seconds: What the changes of plan took.
        active_step_seconds: Mean optimizer step with the fewest units frozen that the
            run has had, which trains all that it ever trains, in the part of a pass
            where it is the shortest: a run's first steps take longer than others.
        frozen_step_seconds: Mean of the other steps.
    """

    seconds: float
    pause_seconds: float
    active_step_seconds: float
    frozen_step_seconds: float

    def __str__(self) -> str:
        """Return it as a sentence."""
        verb = "saved" if self.seconds >= 0 else "cost"
        return (
            f"so far freezing has {verb} {abs(self.seconds):.2f} s of training, and "
            f"changes of plan took {self.pause_seconds:.2f} s: the mean step took "
            f"at least {1e3 * self.active_step_seconds:.3f} ms with the fewest units "
            f"frozen, and {1e3 * self.frozen_step_seconds:.3f} ms with more"
        )

    @classmethod
    def from_json(cls, value: object, what: str) -> Saved:
        """Read what ``dataclasses.asdict`` gave; `what` is its name in errors.

        Raises:
            ValueError: a missing or wrong field (named).
        """
        read = Fields(value, what).read
        names = (entry.name for entry in dataclasses.fields(cls))
        return cls(**{name: read(name, _check_difference) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Return it in the summary's format."""
        return dataclasses.asdict(self)


def _check_difference(value: object, what: str) -> float:
    """Return `value` if it is a number of seconds, which may be below 0."""
    if isinstance(value, (int, float)) and value < 0:
        return -check_seconds(-value, what)
    return check_seconds(value, what)


def saved_by_freezing(
    epochs: Sequence[EpochRecord], changes: Sequence[TransformationRecord]
) -> Saved | None:
    """Compare the segments of the passes so far.

    Args:
        epochs: Of the run.
        changes: Of plan, after the first plan.

    Returns:
        None where units were frozen in all parts alike, and without a part of a pass
        with `_LEAST_STEPS` to compare with.
    """
    parts = [p for epoch in epochs for p in epoch.segments if p.optimizer_steps]
    fewest = min((part.shape.num_frozen_layers for part in parts), default=0)
    frozen = [part for part in parts if part.shape.num_frozen_layers > fewest]
    means = [
        part.seconds / part.optimizer_steps
        for part in parts
        if part.shape.num_frozen_layers == fewest
        and part.optimizer_steps >= _LEAST_STEPS
    ]
    if not frozen or not means:
        return None
    seconds = sum(part.seconds for part in frozen)
    steps = sum(part.optimizer_steps for part in frozen)
    active = min(means)
    return Saved(
        seconds=steps * active - seconds,
        pause_seconds=sum(change.pause_seconds for change in changes),
        active_step_seconds=active,
        frozen_step_seconds=seconds / steps,
    )
