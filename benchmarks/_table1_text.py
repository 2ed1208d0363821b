"""Table 1 as text: the systems, bounds and losses, and throughput by epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from _runs import ACCURACY, WALL_TIME, Result
from _systems import FULL, REFERENCE, STATIC_PIPE
from _table1_report import Table, median_work, shares, throughput
from _text import bar_chart, text_table

PRINTED_LOSSES = 3
# Table 1 of the paper, ViT-B/16 on ImageNet, 16 GPUs; it has no other rival.
PAPER = {STATIC_PIPE: "2.83"}


def print_table(table: Table) -> None:
    """Print the setting's table, where the time goes, and throughput by epoch."""
    print(f"\n== {table.setting} ==")
    print(_systems_text(table))
    print(_bounds_text(table))
    if table.results(REFERENCE) and table.results(FULL):
        worst = list(table.losses(FULL).items())[:PRINTED_LOSSES]
        print("largest losses of full, percent of its run:", _listed(worst))
    test = table.accuracy_test()
    if test is not None:
        print(
            f"accuracy full - {REFERENCE}: mean {test.mean:+.2f} points, one-sided "
            f"95 % lower limit {test.lower_limit:+.2f}"
        )
    for name in table.series:
        results = table.results(name)
        if table.has_phases(name):
            print(f"\n{name}: {_listed(_large(shares(results)))}")
        elif results:
            print(f"\n{name}:")
        if results:
            print(_throughput_chart(results))


def _bounds_text(table: Table) -> str:
    ratios = {ratio.name: ratio for ratio in table.ratios}
    lines = []
    for rival, bound in table.bounds().items():
        told = ratios.get(f"{table.setting} full / {rival}")
        if told is not None:
            lines.append(
                f"full / {rival}: {told.value:.2f} ({told.min:.2f} to {told.max:.2f}), "
                f"bound {bound:.2f}, share {told.value / bound:.0%}; "
                f"paper: {PAPER.get(rival, 'no such rival')}"
            )
    return "\n".join(lines)


def _systems_text(table: Table) -> str:
    ratios = {ratio.name: ratio for ratio in table.ratios}
    lines = []
    for name, series in table.series.items():
        row = series.row(WALL_TIME, "s")
        if not row.values:
            lines.append(
                [name, "-", "-", f"0 ({len(row.dropped)}, {row.failed})", *"---"]
            )
            continue
        over = ratios.get(f"{table.setting} {name} / {STATIC_PIPE}")
        lines.append(
            [
                name,
                f"{row.median:.2f}",
                f"{row.spread:.0%}",
                f"{len(row.values)} ({len(row.dropped)}, {row.failed})",
                "1.00" if name == STATIC_PIPE else f"{over.value:.2f}" if over else "-",
                f"{median_work(table.results(name)):.0f}",
                f"{series.row(ACCURACY, '%').median:.2f}",
            ]
        )
    lines += [[name, "does not fit", *"-----"] for name in table.does_not_fit]
    headers = [
        "system",
        "wall s",
        "spread",
        "runs (dropped, failed)",
        f"x {STATIC_PIPE}",
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
