"""Table 1 as text: the systems, bounds and losses, and throughput by epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.common import Ratio
from harness.text import bar_chart, text_table
from training.runs import ACCURACY, WALL_TIME, Result
from training.systems import AGAIN, FULL, PLAIN, RIVALS, STATIC_PIPE
from training.table1_report import TIMES, Table, median_work, shares, throughput

PRINTED_LOSSES = 3
PAPER = "2.83"  # Table 1 of the paper, ViT-B/16 on ImageNet, 16 GPUs
AT_FAULT = "above its bound, measurement at fault"


def print_table(table: Table) -> None:
    """Print the setting's table, where the time goes, and throughput by epoch."""
    print(f"\n== {table.setting} ==")
    print(_systems_text(table))
    print(_bounds_text(table))
    if table.results(table.reference) and table.results(FULL):
        worst = list(table.losses(FULL).items())[:PRINTED_LOSSES]
        print("largest losses of full, percent of its run:", _listed(worst))
    test = table.accuracy_test()
    if test is not None:
        print(f"accuracy full - {table.reference}: {test}")
    for name in table.series:
        results = table.results(name)
        if table.has_phases(name):
            print(f"\n{name}: {_listed(_large(shares(results)))}")
        elif results:
            print(f"\n{name}:")
        if results:
            print(_throughput_chart(results))


def told_ratio(ratio: Ratio | None) -> str:
    """Return a ratio's cell; one above its bound is no result, and says so."""
    if ratio is None:
        return "-"
    fault = f" > {ratio.bound:.2f}: {AT_FAULT}" if ratio.above_bound else ""
    return f"{ratio.value:.2f}{fault}"


def _bounds_text(table: Table) -> str:
    lines = []
    for metric, suffix in TIMES.items():
        for rival in RIVALS:
            told = table.ratio(FULL, rival, metric)
            if told is not None:
                unbounded = "other threads" if rival == PLAIN else "equal work"
                told_bound = _against_bound(told, unbounded)
                lines.append(f"full / {rival}{suffix}: {told_bound}")
    if table.ratio(FULL, STATIC_PIPE) is not None:
        lines.append(f"paper: full / {STATIC_PIPE} {PAPER}, no other rival")
    again = table.ratio(AGAIN, STATIC_PIPE)
    if again is not None:
        lines.append(
            f"the same system twice: {again.value:.2f} ({again.min:.2f} to "
            f"{again.max:.2f}); nothing smaller means anything"
        )
    return "\n".join(lines)


def _against_bound(ratio: Ratio, unbounded: str) -> str:
    told = f"{ratio.value:.2f} ({ratio.min:.2f} to {ratio.max:.2f})"
    if ratio.bound is None:
        return f"{told}, {unbounded}"
    share = AT_FAULT if ratio.above_bound else f"share {ratio.value / ratio.bound:.0%}"
    return f"{told}, bound {ratio.bound:.2f}, {share}"


def _systems_text(table: Table) -> str:
    lines = []
    for name, series in table.series.items():
        row = series.row(WALL_TIME, "s")
        if not row.values:
            lines.append(
                [name, "-", "-", f"0 ({len(row.dropped)}, {row.failed})", *"----"]
            )
            continue
        own = name == STATIC_PIPE
        speedups = [table.ratio(name, STATIC_PIPE, metric) for metric in TIMES]
        lines.append(
            [
                name,
                f"{row.median:.2f}",
                f"{row.spread:.0%}",
                f"{len(row.values)} ({len(row.dropped)}, {row.failed})",
                *("1.00" if own else told_ratio(each) for each in speedups),
                f"{median_work(table.results(name)):.0f}",
                f"{series.row(ACCURACY, '%').median:.2f}",
            ]
        )
    lines += [[name, "does not fit", *"------"] for name in table.does_not_fit]
    lines += [[name, f"as {other}", *"------"] for name, other in table.same_as.items()]
    headers = [
        "system",
        "wall s",
        "spread",
        "runs (dropped, failed)",
        f"x {STATIC_PIPE}",
        "x, no evaluation",
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
        plans = " or ".join("x".join(map(str, plan)) for plan in entry["plans"])
        label = f"epoch {entry['epoch']} frozen {entry['num_frozen_layers']:2} {plans}"
        bars.append((label, entry["samples_per_s"]))
    return bar_chart(bars, unit="samples/s")
