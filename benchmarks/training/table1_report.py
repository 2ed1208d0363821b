"""What Table 1 derives from its runs: ratios, bounds, losses, throughput by epoch."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from harness.common import Ratio, Row, Series, Target, compared
from harness.paired import NonInferiority, non_inferiority
from training.losses import breakdown, losses, seconds_per_work
from training.runs import ACCURACY, TRAINING_TIME, WALL_TIME, Result
from training.systems import (
    AGAIN,
    ANY_SCHEDULE,
    DDP,
    FULL,
    KEPT,
    PLAIN,
    REFERENCE,
    RIVALS,
    STATIC_PIPE,
    UNCACHED,
)

# Of its bounds that the whole system is to reach, evaluations and pauses included.
SHARE = 0.9
# Each speed-up is given for both: metric -> what a ratio's name ends with.
TIMES = {WALL_TIME: "", TRAINING_TIME: " without evaluation"}


@dataclass(frozen=True)
class Table:
    """One memory setting's runs and everything that is derived from them.

    Attributes:
        setting: Its name.
        series: The repeats of each system.
        accuracies: Final accuracy in percent of every finished run, by system and
            seed.
        does_not_fit: Systems that the cap rules out.
        same_as: Systems that the cap leaves no choice, and what they then are.
        row_factor: What a trained row costs in the micro-batches of static-pipe, over
            what it costs at the best size.
        quick: One repeat is enough; not for publication.
    """

    setting: str
    series: Mapping[str, Series]
    accuracies: Mapping[str, Mapping[int, float]]
    does_not_fit: tuple[str, ...] = ()
    same_as: Mapping[str, str] = field(default_factory=dict)
    row_factor: float = 1.0
    quick: bool = False

    def results(self, system: str) -> list[Result]:
        """Return the clean runs of a system, in the order of the repeats."""
        return results_of(self.series[system]) if system in self.series else []

    @property
    def reference(self) -> str:
        """The unfrozen system that losses and accuracy are compared with."""
        return self.same_as.get(REFERENCE, REFERENCE)

    def rows(self) -> list[Row]:
        """Return wall time, training time and accuracy of every system."""
        metrics = {**dict.fromkeys(TIMES, "s"), ACCURACY: "%"}
        return [
            replace(series.row(metric, unit), metric=f"{self.setting} {metric}")
            for series in self.series.values()
            for metric, unit in metrics.items()
        ]

    @functools.cached_property
    def ratios(self) -> list[Ratio]:
        """Each system's speed-up over static-pipe, the whole one's over each rival.

        With and without the evaluations, each with its bound.
        """
        pairs = [(name, STATIC_PIPE) for name in self.series]
        rivals = [rival for rival in RIVALS if rival != STATIC_PIPE]
        pairs += [(whole, rival) for whole in (FULL, KEPT) for rival in rivals]
        pairs += [(UNCACHED, DDP), (ANY_SCHEDULE, FULL), (KEPT, FULL)]
        return [
            speedup
            for metric in TIMES
            for system, rival in pairs
            if system != rival and {system, rival} <= self.series.keys()
            for speedup in self._speedup(system, rival, metric)
        ]

    def ratio(self, system: str, rival: str, metric: str = WALL_TIME) -> Ratio | None:
        """Return a speed-up; None if it was refused or is not formed."""
        name = self.ratio_name(system, rival, metric)
        return next((each for each in self.ratios if each.name == name), None)

    def ratio_name(self, system: str, rival: str, metric: str) -> str:
        """Return the name of a speed-up."""
        return f"{self.setting} {system} / {rival}{TIMES[metric]}"

    def _speedup(self, system: str, rival: str, metric: str) -> list[Ratio]:
        bound, target = self.bound(system, rival, metric), None
        if system in (FULL, KEPT) and metric == WALL_TIME and bound is not None:
            target = Target(SHARE * bound, at_least=True, of="value")
        return compared(
            self.ratio_name(system, rival, metric),
            self.series[rival].row(metric, "s"),
            self.series[system].row(metric, "s"),
            better_than=rival,
            bound=bound,
            target=target,
            quick=self.quick,
        )

    def bound(self, system: str, rival: str, metric: str = WALL_TIME) -> float | None:
        """Return the most that a system's speed-up over a rival can be.

        It is the ratio of their work; where that is equal nothing is bounded, unless
        the rival is static-pipe: its bubble and its small micro-batches are losses
        of its own, which no run of the benchmark is needed to know. The same system
        twice has no bound: its ratio is the error of the others. Nor has plain as the
        rival: what its operators lose by being split over threads is its own, too, and
        is not known.
        """
        over, under = self.results(rival), self.results(system)
        if not over or not under or system == AGAIN or rival == PLAIN:
            return None
        training = metric == TRAINING_TIME
        own = median_work(under, training=training)
        if rival == STATIC_PIPE:
            trained = median_work(over, training=True)
            evaluated = 0.0 if training else median_work(over) - trained
            return _fill(over[0]) * (self.row_factor * trained + evaluated) / own
        work = median_work(over, training=training)
        return work / own if work != own else None

    def losses(self, system: str) -> dict[str, float]:
        """Return the percent of a system's wall time lost against the reference.

        Repeats are paired with the reference's; the largest loss comes first.
        """
        lost: list[dict[str, float]] = []
        references = self._by_turn(self.reference)
        for turn, result in self._by_turn(system).items():
            if turn not in references:
                continue
            reference = references[turn]
            rate = seconds_per_work(breakdown(reference.summary), reference.work)
            found = losses(breakdown(result.summary), result.work, rate)
            lost.append({name: 100 * s / result.wall_s for name, s in found.items()})
        medians = _medians(lost)
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    def _by_turn(self, system: str) -> dict[int, Result]:
        results = self.results(system)
        turns = self.series[system].turns or range(len(results))
        return dict(zip(turns, results, strict=True))

    def sections(self) -> dict[str, Any]:
        """Return what the JSON holds alongside rows and ratios."""
        names = [name for name in self.series if self.results(name)]
        in_engine = [name for name in names if self.has_phases(name)]
        return {
            "work": {name: median_work(self.results(name)) for name in names},
            "training_work": {
                name: median_work(self.results(name), training=True) for name in names
            },
            "does_not_fit": list(self.does_not_fit),
            "same_as": dict(self.same_as),
            "row_factor": self.row_factor,
            "breakdown_percent": {n: shares(self.results(n)) for n in in_engine},
            "losses_percent": {
                name: self.losses(name)
                for name in in_engine
                if self.results(self.reference)
            },
            "pauses": {name: pauses(self.results(name)) for name in in_engine},
            "throughput": {name: throughput(self.results(name)) for name in names},
            "accuracy": self._accuracy_test(),
            "accuracy_by_seed": {
                name: {str(seed): value for seed, value in by_seed.items()}
                for name, by_seed in self.accuracies.items()
            },
            "failures": {
                name: list(series.failures) for name, series in self.series.items()
            },
        }

    def has_phases(self, system: str) -> bool:
        """Tell whether the engine's clock ran; plain loops know no all-reduce."""
        results = self.results(system)
        return bool(results) and "connect" in results[0].summary["phase_seconds"]

    def _accuracy_test(self) -> dict[str, object] | None:
        test = self.accuracy_test()
        return test.to_json() if test is not None else None

    def accuracy_test(self) -> NonInferiority | None:
        """Compare ``full`` with the unfrozen reference over the seeds both ran."""
        frozen = self.accuracies.get(FULL, {})
        unfrozen = self.accuracies.get(self.reference, {})
        seeds = sorted(frozen.keys() & unfrozen.keys())
        if len(seeds) < 2:
            return None
        return non_inferiority(
            [frozen[seed] for seed in seeds], [unfrozen[seed] for seed in seeds]
        )


def results_of(series: Series) -> list[Result]:
    """Return the clean runs of a series of jobs."""
    return [cast(Result, repeat) for repeat in series.clean]


def median_work(results: Sequence[Result], *, training: bool = False) -> float:
    """Return the median work of a system's runs, or that of their training alone."""
    return float(
        statistics.median(r.training_work if training else r.work for r in results)
    )


def _fill(result: Result) -> float:
    """Return how much longer than its work a pipeline of equal stages takes."""
    epoch = result.summary["epochs"][0]
    stages, cells = int(epoch["num_stages"]), int(epoch["num_microbatches"])
    return (cells + stages - 1) / cells


def _medians(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not parts:
        return {}
    return {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def throughput(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one entry per epoch: plan, hits, and median samples per second."""
    epochs = zip(*(result.summary["epochs"] for result in results), strict=True)
    return [_epoch_entry(repeats) for repeats in epochs]


def _epoch_entry(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = repeats[0]
    plans = {
        (epoch["num_stages"], epoch["num_replicas"], epoch["num_microbatches"])
        for epoch in repeats
    }
    return {
        "epoch": first["epoch"],
        "num_frozen_layers": first["num_frozen_layers"],
        "plans": [list(plan) for plan in sorted(plans)],  # (K, R, M) of any repeat
        "cache_hits": first["cache_hits"],
        "samples_per_s": statistics.median(
            e["samples"] / e["seconds"] for e in repeats
        ),
    }


def shares(results: Sequence[Result]) -> dict[str, float]:
    """Return the percent of the wall time in each category, median over repeats."""
    parts = []
    for result in results:
        seconds = breakdown(result.summary)
        parts.append({name: 100 * s / result.wall_s for name, s in seconds.items()})
    return _medians(parts)


def pauses(results: Sequence[Result]) -> dict[str, float]:
    """Return number of transformations, and their pauses in ms: median and longest."""
    found = [
        1000 * change["pause_seconds"]
        for result in results
        for change in result.summary["transformations"]
    ]
    return {
        "transformations_per_run": len(found) / len(results),
        "median_ms": statistics.median(found) if found else 0.0,
        "longest_ms": max(found, default=0.0),
    }
