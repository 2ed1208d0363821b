"""What Table 1 derives from its runs: ratios, bounds, losses, throughput by epoch."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from _harness import Ratio, RatioRefused, Row, Series, ratio
from _losses import breakdown, losses, seconds_per_work
from _paired import NonInferiority, non_inferiority
from _runs import ACCURACY, WALL_TIME, Result
from _systems import DDP, FULL, REFERENCE, RIVALS, STATIC_PIPE


@dataclass(frozen=True)
class Table:
    """One memory setting's runs and everything that is derived from them.

    Attributes:
        setting: Its name.
        series: The repeats of each system.
        accuracies: Final accuracy in percent of every finished run, by system and
            seed.
        does_not_fit: Systems that the cap rules out.
        quick: One repeat is enough; not for publication.
    """

    setting: str
    series: Mapping[str, Series]
    accuracies: Mapping[str, Mapping[int, float]]
    does_not_fit: tuple[str, ...] = ()
    quick: bool = False

    def results(self, system: str) -> list[Result]:
        """Return the clean runs of a system, in the order of the repeats."""
        clean = self.series[system].clean if system in self.series else ()
        return [cast(Result, repeat) for repeat in clean]

    def rows(self) -> list[Row]:
        """Return wall time and accuracy of every system."""
        return [
            replace(series.row(metric, unit), metric=f"{self.setting} {metric}")
            for series in self.series.values()
            for metric, unit in ((WALL_TIME, "s"), (ACCURACY, "%"))
        ]

    @functools.cached_property
    def ratios(self) -> list[Ratio]:
        """Each system's speed-up over static-pipe, and full's over each rival."""
        pairs = [(name, STATIC_PIPE) for name in self.series]
        pairs += [(FULL, rival) for rival in (DDP, REFERENCE)]
        found = []
        for system, rival in pairs:
            if system == rival or not {system, rival} <= self.series.keys():
                continue
            try:
                found.append(self._speedup(system, rival))
            except RatioRefused as refusal:
                print(f"refused: {refusal}")
        return found

    def _speedup(self, system: str, rival: str) -> Ratio:
        return ratio(
            f"{self.setting} {system} / {rival}",
            self.series[rival].row(WALL_TIME, "s"),
            self.series[system].row(WALL_TIME, "s"),
            better_than=rival,
            quick=self.quick,
        )

    def bounds(self) -> dict[str, float]:
        """Return the work bound of ``full`` against each rival that ran."""
        if not self.results(FULL):
            return {}
        return {rival: self._bound(rival) for rival in RIVALS if self.results(rival)}

    def _bound(self, rival: str) -> float:
        bound = median_work(self.results(rival)) / median_work(self.results(FULL))
        if rival == STATIC_PIPE:
            epoch = self.results(rival)[0].summary["epochs"][0]
            stages, cells = epoch["num_stages"], epoch["num_microbatches"]
            bound *= (cells + stages - 1) / cells
        return bound

    def losses(self, system: str) -> dict[str, float]:
        """Return the percent of a system's wall time lost against the reference.

        Repeats are paired with the reference's; the largest loss comes first.
        """
        lost: list[dict[str, float]] = []
        references = self._by_turn(REFERENCE)
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
        """Return what the JSON holds beside rows and ratios."""
        names = [name for name in self.series if self.results(name)]
        in_engine = [name for name in names if self.has_phases(name)]
        return {
            "work": {name: median_work(self.results(name)) for name in names},
            "bounds": self.bounds(),
            "does_not_fit": list(self.does_not_fit),
            "breakdown_percent": {n: shares(self.results(n)) for n in in_engine},
            "losses_percent": {
                name: self.losses(name) for name in in_engine if self.results(REFERENCE)
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
        unfrozen = self.accuracies.get(REFERENCE, {})
        seeds = sorted(frozen.keys() & unfrozen.keys())
        if len(seeds) < 2:
            return None
        return non_inferiority(
            [frozen[seed] for seed in seeds], [unfrozen[seed] for seed in seeds]
        )


def median_work(results: Sequence[Result]) -> float:
    """Return the median work of a system's runs."""
    return float(statistics.median(result.work for result in results))


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
