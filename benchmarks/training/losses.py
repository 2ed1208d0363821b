"""Where a run's time goes, and what of it the run's own work does not explain.

Derived in METRICS.md. The lead's clock charges every second to one phase; here the
phases become the categories of the table, in seconds, and a reference run's rate of
work says how long the work alone would have taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Last part of a phase's name -> category; what is not named here is its first part.
_INNER = {
    "all_reduce": "all-reduce",
    "cache_read": "cache reads",
    "cache_write": "cache writes",
    "data": "data",
}
_OUTER = {
    "forward": "compute",
    "backward": "compute",
    "evaluate": "evaluation",
    "optimizer": "optimizer",
    "data": "data",
    "profile": "profiling",
    "transformation": "transformations",
    "pass": "passes",
    "checkpoint": "checkpoints",
}
CATEGORIES = (
    "compute",
    "populate",
    "evaluation",
    "bubble",
    "all-reduce",
    "cache reads",
    "cache writes",
    "optimizer",
    "data",
    "profiling",
    "transformations",
    "passes",
    "checkpoints",
    "rest",
)
WORK = ("compute", "populate", "evaluation")  # what the work bound counts


def category_of(phase: str) -> str:
    """Return the category of a clock's phase, for example of ``forward/prefix``."""
    outer, _, inner = phase.partition("/")
    if outer == "forward" and inner == "prefix":
        return "populate"
    return _INNER.get(inner) or _OUTER.get(outer, "rest")


def breakdown(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each category; they add up to the run's wall time."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for phase, spent in summary["phase_seconds"].items():
        seconds[category_of(phase)] += spent
    bubble = sum(_bubble(epoch) for epoch in summary["epochs"])
    seconds["bubble"] = bubble
    seconds["compute"] -= bubble
    seconds["rest"] += summary["total_seconds"] - sum(seconds.values())
    return seconds


def _bubble(epoch: Mapping[str, Any]) -> float:
    """Return the seconds in which a pass's stages stood still, averaged over stages."""
    if epoch["num_stages"] == 1:
        return 0.0
    busy, phases = epoch["worker_seconds"], epoch["phase_seconds"]
    running = sum(
        phases.get(name, 0.0) for name in ("forward", "backward", "forward/prefix")
    )
    return max(0.0, running - sum(busy) / len(busy)) if busy else 0.0


def losses(
    run: Mapping[str, float], work: float, seconds_per_work: float
) -> dict[str, float]:
    """Return the seconds of a run that the reference's rate does not explain.

    Args:
        run: The run's `breakdown`.
        work: The run's work.
        seconds_per_work: The reference's, of its work categories alone.

    Returns:
        Seconds per category; ``slower work`` is what the run's own work took longer
        than at the reference's rate, below zero where it was faster.
    """
    lost = {name: run[name] for name in run if name not in WORK}
    lost["slower work"] = sum(run[name] for name in WORK) - work * seconds_per_work
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


def seconds_per_work(run: Mapping[str, float], work: float) -> float:
    """Return a reference run's seconds per unit of its work, losses left out."""
    return sum(run[name] for name in WORK) / work
