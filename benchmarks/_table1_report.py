"""What Table 1 says of its runs: ratios, bounds, losses, throughput by epoch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from _harness import Ratio, RatioRefused, Row, Series, ratio
from _losses import breakdown, losses, seconds_per_work
from _paired import NonInferiority, non_inferiority
from _runs import ACCURACY, WALL_TIME, Result
from _text import bar_chart, text_table

NO_CAP = "no-cap"
REFERENCE = "best-static"
RIVALS = ("static-pipe", "ddp", REFERENCE)
PRINTED_LOSSES = 3


@dataclass(frozen=True)
class Table:
    """One memory setting's runs and everything that is derived from them.

    Attributes:
        setting: Its name.
        series: The repeats of each system.
        quick: One repeat is enough; not for publication.
    """

    setting: str
    series: Mapping[str, Series]
    quick: bool

    def results(self, system: str) -> list[Result]:
        """Return the clean runs of a system."""
        clean = self.series[system].clean if system in self.series else ()
        return [cast(Result, repeat) for repeat in clean]

    def rows(self) -> list[Row]:
        """Return wall time, accuracy and work of every system."""
        rows = []
        for series in self.series.values():
            for metric, unit in ((WALL_TIME, "s"), (ACCURACY, "%")):
                row = series.row(metric, unit)
                told = f"{self.setting} {metric}"
                rows.append(replace(row, metric=told))
        return rows

    def ratios(self) -> list[Ratio]:
        """Return the speed-up of each system over static-pipe, and over the best."""
        found = [
            self._speedup(name, RIVALS[0]) for name in self.series if name != RIVALS[0]
        ]
        if "full" in self.series:
            best = self.best_static()
            if best != RIVALS[0]:
                found.append(self._speedup("full", best))
        return [ratio for ratio in found if ratio is not None]

    def best_static(self) -> str:
        """Return the faster of ddp and best-static, those that ran."""
        ran = [name for name in RIVALS[1:] if self.results(name)]
        if not ran:
            return RIVALS[0]
        return min(ran, key=lambda n: self.series[n].row(WALL_TIME, "s").median)

    def _speedup(self, system: str, rival: str) -> Ratio | None:
        try:
            return ratio(
                f"{self.setting} {system} / {rival}",
                self.series[rival].row(WALL_TIME, "s"),
                self.series[system].row(WALL_TIME, "s"),
                better_than=rival,
                quick=self.quick,
            )
        except RatioRefused as refusal:
            print(f"no ratio {system} / {rival}: {refusal}")
            return None

    def bounds(self) -> dict[str, float]:
        """Return the work bound of ``full`` against each rival that ran."""
        if not self.results("full"):
            return {}
        return {rival: self._bound(rival) for rival in RIVALS if self.results(rival)}

    def _bound(self, rival: str) -> float:
        bound = _median_work(self.results(rival)) / _median_work(self.results("full"))
        if rival == RIVALS[0]:
            epoch = self.results(rival)[0].summary["epochs"][0]
            stages, cells = epoch["num_stages"], epoch["num_microbatches"]
            bound *= (cells + stages - 1) / cells
        return bound

    def losses(self, system: str) -> dict[str, float]:
        """Return the percent of a system's wall time lost against the reference.

        Repeats are paired with the reference's; the largest loss comes first.
        """
        lost: list[dict[str, float]] = []
        pairs = zip(self.results(system), self.results(REFERENCE), strict=False)
        for result, reference in pairs:
            rate = seconds_per_work(breakdown(reference.summary), reference.work)
            found = losses(breakdown(result.summary), result.work, rate)
            lost.append({name: 100 * s / result.wall_s for name, s in found.items()})
        medians = _medians(lost)
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    def sections(self) -> dict[str, Any]:
        """Return what the JSON holds beside rows and ratios."""
        names = [name for name in self.series if self.results(name)]
        return {
            "work": {name: _median_work(self.results(name)) for name in names},
            "bounds": self.bounds(),
            "breakdown_percent": {name: shares(self.results(name)) for name in names},
            "losses_percent": {
                name: self.losses(name)
                for name in names
                if self.results(REFERENCE) and name != "ddp"
            },
            "pauses": {name: pauses(self.results(name)) for name in names},
            "throughput": {name: throughput(self.results(name)) for name in names},
            "accuracy": self._accuracy_test(),
            "accuracy_by_seed": {name: self.by_seed(name) for name in names},
            "failures": {
                name: list(series.failures) for name, series in self.series.items()
            },
        }

    def _accuracy_test(self) -> dict[str, object] | None:
        test = self.accuracy_test()
        return test.to_json() if test is not None else None

    def accuracy_test(self) -> NonInferiority | None:
        """Compare ``full`` with the unfrozen reference over the seeds both ran."""
        frozen, unfrozen = self.by_seed("full"), self.by_seed(REFERENCE)
        seeds = [seed for seed in frozen if seed in unfrozen]
        if len(seeds) < 2:
            return None
        return non_inferiority(
            [frozen[seed] for seed in seeds], [unfrozen[seed] for seed in seeds]
        )

    def by_seed(self, system: str) -> dict[str, float]:
        """Return the final accuracy of each seed in percent."""
        results = self.results(system)
        return {str(result.seed): result.metrics[ACCURACY] for result in results}


def _median_work(results: Sequence[Result]) -> float:
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


def print_table(table: Table) -> None:
    """Print the setting's table, where the time goes, and throughput by epoch."""
    print(f"\n== {table.setting} ==")
    print(_systems_text(table))
    ratios = {ratio.name: ratio for ratio in table.ratios()}
    for rival, bound in table.bounds().items():
        told = ratios.get(f"{table.setting} full / {rival}")
        if told is not None:
            print(
                f"full / {rival}: {told.value:.2f} ({told.min:.2f} to {told.max:.2f}), "
                f"bound {bound:.2f}, share {told.value / bound:.0%}"
            )
    if table.results(REFERENCE) and table.results("full"):
        worst = list(table.losses("full").items())[:PRINTED_LOSSES]
        print("largest losses of full, percent of its run:", _listed(worst))
    for name in table.series:
        if table.results(name):
            print(f"\n{name}: {_listed(_large(shares(table.results(name))))}")
            print(_throughput_chart(table.results(name)))


def _systems_text(table: Table) -> str:
    ratios = {ratio.name: ratio for ratio in table.ratios()}
    lines = []
    for name, series in table.series.items():
        row = series.row(WALL_TIME, "s")
        if not row.values:
            lines.append([name, "failed", "-", "-", "-", "-", "-"])
            continue
        over = ratios.get(f"{table.setting} {name} / {RIVALS[0]}")
        lines.append(
            [
                name,
                f"{row.median:.2f}",
                f"{row.spread:.0%}",
                f"{len(row.values)} ({row.dropped})",
                "1.00" if name == RIVALS[0] else f"{over.value:.2f}" if over else "-",
                f"{_median_work(table.results(name)):.0f}",
                f"{series.row(ACCURACY, '%').median:.2f}",
            ]
        )
    headers = [
        "system",
        "wall s",
        "spread",
        "runs (dropped)",
        f"x {RIVALS[0]}",
        "work",
        "accuracy %",
    ]
    return text_table(headers, lines)


def _large(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [(name, percent) for name, percent in ordered if percent >= 0.1]


def _listed(parts: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {percent:.1f} %" for name, percent in parts)


def _throughput_chart(results: Sequence[Result]) -> str:
    bars = []
    for entry in throughput(results):
        plans = " or ".join("x".join(map(str, plan[:2])) for plan in entry["plans"])
        label = f"epoch {entry['epoch']} frozen {entry['num_frozen_layers']:2} {plans}"
        bars.append((label, entry["samples_per_s"]))
    return bar_chart(bars, unit="samples/s")
