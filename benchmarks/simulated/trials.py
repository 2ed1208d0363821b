"""Layers measured alone and simulated, in turn with the same model in the real pipe."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from harness.common import Dropped, Repeat, Row, Series, interleave
from harness.quiet import Measured, when_quiet
from harness.timing import Sample
from pipetransformer.pipe import Pipe
from pipetransformer.planner import Profile
from simulated.steps import Case, simulated_s

MEASURED, SIMULATED, ALONE = "step time", "simulated", "layers alone"

_T = TypeVar("_T")
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """One model, and the ways in which its step is run.

    Attributes:
        name: Unique.
        kind: What it stands for in a summary.
        model: Makes it, with the same weights each time.
        inputs: Of a step.
        targets: Of a step.
        loss: A mean over rows.
        cases: The ways.
        alone: Measures each of its layers alone.
        steps: Steps of one timed repeat; their median counts.
    """

    name: str
    kind: str
    model: Callable[[], nn.Sequential]
    inputs: Tensor
    targets: Tensor
    loss: Loss
    cases: tuple[Case, ...]
    alone: Callable[[], Profile]
    steps: int = 1

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return len(self.inputs)


class Stepper:
    """Runs one case of a subject in the real pipeline, a thread per stage.

    Args:
        subject: Whose model is run.
        case: How.
    """

    def __init__(self, subject: Subject, case: Case) -> None:
        self._subject = subject
        self._outside = case.schedule == "gpipe"  # the loss, and its backward
        self._pipe = Pipe.from_plan(
            subject.model(),
            cuts=case.cuts,
            num_microbatches=case.num_microbatches,
            checkpoint=case.checkpoint,
            schedule=case.schedule,
            loss=None if self._outside else subject.loss,
            dispatch="threads",
        )

    def seconds(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self._once() for _ in range(self._subject.steps))

    def _once(self) -> float:
        subject = self._subject
        self._pipe.zero_grad()
        start = time.perf_counter()
        if self._outside:
            loss = subject.loss(self._pipe(subject.inputs), subject.targets)
        else:
            loss = self._pipe(subject.inputs, targets=subject.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - start

    def close(self) -> None:
        """End its threads."""
        self._pipe.close()


@dataclass(frozen=True)
class Compared:
    """Measured and simulated seconds of one case, repeat by repeat."""

    case: Case
    measured: Row
    simulated: Row


@dataclass(frozen=True)
class _Early:
    """An attempt that another one replaced."""

    turn: int
    why: str
    sample: Sample
    metrics: dict[str, float]


class Trial:
    """Measures a subject's layers alone and runs its cases, in turn.

    Args:
        subject: The subject.
        repeats: Of each case, and of measuring the layers.
        patience_s: How long to wait for quiet before each, see `when_quiet`.
    """

    def __init__(
        self, subject: Subject, *, repeats: int, patience_s: float = 0.0
    ) -> None:
        self._subject = subject
        self._repeats = repeats
        self._patience_s = patience_s
        self._cases = {f"{subject.name}, {case}": case for case in subject.cases}
        self._steppers: dict[str, Stepper] = {}
        names = (ALONE, *self._cases)
        self._attempts: dict[str, list[_Early]] = {name: [] for name in names}
        self._shares: dict[str, list[float]] = {name: [] for name in names}
        self.profiles: list[Profile] = []

    def run(self) -> list[Compared]:
        """Return what came of each case."""
        subject = self._subject
        self._steppers = {n: Stepper(subject, case) for n, case in self._cases.items()}
        try:
            series = interleave([ALONE, *self._cases], self._one, repeats=self._repeats)
        finally:
            for stepper in self._steppers.values():
                stepper.close()
        return [
            Compared(
                case,
                self._row(series[name], name, MEASURED, MEASURED),
                self._row(series[ALONE], name, name, SIMULATED),
            )
            for name, case in self._cases.items()
        ]

    def _one(self, system: str, turn: int) -> Repeat:
        patience_s = self._patience_s
        if system != ALONE:
            timed = when_quiet(self._steppers[system].seconds, patience_s=patience_s)
            self._note(system, turn, timed, lambda value: {MEASURED: value})
            return Repeat(timed.sample, {MEASURED: timed.value})
        alone = when_quiet(self._subject.alone, patience_s=patience_s)
        self._note(system, turn, alone, self._simulated)
        self.profiles.append(alone.value)
        return Repeat(alone.sample, self._simulated(alone.value))

    def _simulated(self, profile: Profile) -> dict[str, float]:
        rows = self._subject.rows
        return {n: simulated_s(profile, case, rows) for n, case in self._cases.items()}

    def _note(
        self,
        system: str,
        turn: int,
        found: Measured[_T],
        metrics: Callable[[_T], dict[str, float]],
    ) -> None:
        """Keep what others used, and the attempts that they disturbed."""
        if found.others_share is not None:
            self._shares[system].append(found.others_share)
        self._attempts[system] += [
            _Early(turn, attempt.why_dropped, attempt.sample, metrics(attempt.value))
            for attempt in found.dropped
        ]

    def _row(self, series: Series, name: str, metric: str, title: str) -> Row:
        row = series.row(metric, "s")
        shares = self._shares[series.system]
        early = tuple(
            Dropped(each.turn, each.metrics[metric], each.why, each.sample)
            for each in self._attempts[series.system]
        )
        return dataclasses.replace(
            row,
            system=name,
            metric=title,
            dropped=early + row.dropped,
            foreign_share=statistics.median(shares) if shares else None,
        )
