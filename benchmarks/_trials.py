"""Layers measured alone and simulated, in turn with the same model in the real pipe."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from _harness import Repeat, Row, Series, interleave
from _quiet import when_quiet
from _simulated import Case, simulated_s
from torch import Tensor, nn

from pipetransformer.pipe import Pipe
from pipetransformer.planner import Profile

MEASURED, SIMULATED, ALONE = "step time", "simulated", "layers alone"

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
        self._dropped = dict.fromkeys((ALONE, *self._cases), 0)
        self._shares: dict[str, list[float]] = {name: [] for name in self._dropped}
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

    def _one(self, system: str, _turn: int) -> Repeat:
        patience_s = self._patience_s
        if system != ALONE:
            timed = when_quiet(self._steppers[system].seconds, patience_s=patience_s)
            self._note(system, timed.others_share, timed.dropped)
            return Repeat(timed.sample, {MEASURED: timed.value})
        alone = when_quiet(self._subject.alone, patience_s=patience_s)
        self._note(system, alone.others_share, alone.dropped)
        self.profiles.append(alone.value)
        rows = self._subject.rows
        metrics = {
            name: simulated_s(alone.value, case, rows)
            for name, case in self._cases.items()
        }
        return Repeat(alone.sample, metrics)

    def _note(self, system: str, share: float | None, dropped: int) -> None:
        self._dropped[system] += dropped
        if share is not None:
            self._shares[system].append(share)

    def _row(self, series: Series, name: str, metric: str, title: str) -> Row:
        row = series.row(metric, "s")
        shares = self._shares[series.system]
        return dataclasses.replace(
            row,
            system=name,
            metric=title,
            dropped=row.dropped + self._dropped[series.system],
            foreign_share=statistics.median(shares) if shares else None,
        )
