"""Errors of simulated times, and their summary by kind."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
ALL = "all"


@dataclass(frozen=True)
class Error:
    """Of one case.

    Attributes:
        case: Its name.
        subject: Name of the pipeline.
        kind: Of the pipeline.
        schedule: Of the case.
        checkpoint: Of the case.
        num_stages: K.
        num_microbatches: M.
        measured_s: Median.
        value: Simulated over measured time, less 1: below 0 if the step took longer
            than the simulator says.
    """

    case: str
    subject: str
    kind: str
    schedule: str
    checkpoint: str
    num_stages: int
    num_microbatches: int
    measured_s: float
    value: float


@dataclass(frozen=True)
class Summary:
    """Of the errors of one group.

    Attributes:
        group: Its name.
        pipelines: Number of pipelines.
        cases: Number of cases.
        median: Of the errors' absolute values.
        worst: Of the errors' absolute values.
        bias: Median of the errors with their signs.
    """

    group: str
    pipelines: int
    cases: int
    median: float
    worst: float
    bias: float


def summary(group: str, errors: Sequence[Error]) -> Summary:
    """Summarise a group that is not empty."""
    sizes = [abs(error.value) for error in errors]
    return Summary(
        group,
        len({error.subject for error in errors}),
        len(errors),
        statistics.median(sizes),
        max(sizes),
        statistics.median(error.value for error in errors),
    )


def summaries(errors: Sequence[Error]) -> list[Summary]:
    """Summarise all, each kind, and each schedule and mode of each kind."""
    found = [summary(ALL, errors)] if errors else []
    for kind in _in_order(error.kind for error in errors):
        of_kind = [error for error in errors if error.kind == kind]
        found.append(summary(kind, of_kind))
        for ways in _in_order((e.schedule, e.checkpoint) for e in of_kind):
            some = [e for e in of_kind if (e.schedule, e.checkpoint) == ways]
            found.append(summary(f"{kind}, {ways[0]}, {ways[1]}", some))
    return found


def _in_order(values: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(values))
