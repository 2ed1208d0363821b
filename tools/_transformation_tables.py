"""Tables of what transformations cost and survive."""

from __future__ import annotations

from collections import Counter
from statistics import median

from _markdown import Content, markdown, median_and_range, number

ABSENT = "-"


def faults(content: Content) -> list[str]:
    """Cases by fault: how many runs survivors brought to their end, and how long."""
    counts = ("cases", "attempts", "failed")
    headers = ["fault", *counts, "went on", "median s", "longest s"]
    went_on = Counter(
        case["fault"] for case in content["cases"] if "finished" in case["outcome"]
    )
    rest = ("checkpoints", "unnamed")
    lines = [
        [
            fault,
            *(str(row[key]) for key in counts),
            str(went_on[fault]),
            *(_seconds(row[key]) for key in ("median_s", "max_s")),
            *(str(row[key]) for key in rest),
        ]
        for fault, row in content["summary"].items()
    ]
    rows = content["summary"].values()
    first, last = (
        [str(sum(row[key] for row in rows)) for key in keys] for keys in (counts, rest)
    )
    total = ["all", *first, str(went_on.total()), ABSENT, ABSENT, *last]
    told = f"[All cases]({content['link']}/{content['name']}.md)."
    if skipped := sum(row["skipped"] for row in rows):
        told = f"{skipped} attempts were left out on this machine. {told}"
    return [
        *markdown([*headers, "checkpoints", "named nobody"], [*lines, total]),
        "",
        told,
    ]


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def losses(content: Content) -> list[str]:
    """Ranks that were lost at random times: what came of it, and how long it took."""
    lines = []
    for signal, counts in content["summary"].items():
        for outcome, count in counts.items():
            took = [
                loss["seconds"]
                for loss in content["losses"]
                if (loss["signal"], loss["outcome"]) == (signal, outcome)
                and loss["seconds"] is not None
            ]
            times = [_seconds(f(took) if took else None) for f in (median, max)]
            if count:
                lines.append([signal, outcome, str(count), *times])
    settings = ", ".join(f"{key} {value}" for key, value in content["settings"].items())
    runs, failed, fenced = (content[key] for key in ("runs", "failed", "fenced"))
    return [
        *markdown(["signal", "outcome", "ranks", "median s", "longest s"], lines),
        "",
        f"{runs} runs, {failed} not as promised; {settings}. Ranks that were not "
        f"struck, but that the others went on without: {fenced}.",
        *(f"* {text}" for text in content["problems"]),
    ]


def endurance(content: Content) -> list[str]:
    """Largest count of a rank, early and at the end, for each way to make groups."""
    headers = ["groups", "changes", "descriptors", "threads", "memory MB", "store keys"]
    kinds = ("descriptors", "threads", "memory_mb", "store_keys")
    lines = []
    for name, run in content["runs"].items():
        cells = []
        for kind in kinds:
            early, late = (
                max(rank[kind] for rank in run[when]) for when in ("before", "after")
            )
            cells.append(f"{number(early)} to {number(late)}")
        lines.append([name, f"{content['early']} to {run['changes']}", *cells])
    return [*markdown(headers, lines), "", "One run each."]


def pauses(content: Content) -> list[str]:
    """Whole pauses by kind of change: milliseconds, the move, steps."""
    metrics = (
        *("pause", "move", "pause in steps", "without moved bytes"),
        *("with its first step", "predicted"),
    )
    return _by_system(content, metrics, "pause")


def switches(content: Content) -> list[str]:
    """The change of groups alone, in milliseconds."""
    parts = ("p50", "p90", "protocol", "group", "first_collective")
    return _by_system(content, parts, "p50")


def _by_system(content: Content, metrics: tuple[str, ...], needed: str) -> list[str]:
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    units = {row["metric"]: row["unit"] for row in content["rows"]}
    metrics = tuple(metric for metric in metrics if metric in units)
    systems = [system for system, metric in cells if metric == needed]
    return markdown(
        ["", *(f"{m} ({units[m]})" if units[m] == "ms" else m for m in metrics)],
        [[s, *(median_and_range(cells.get((s, m))) for m in metrics)] for s in systems],
    )


def curve(content: Content) -> list[str]:
    """How far the elastic run is from the static one, and what rounding alone does."""
    headers = ["largest difference", "elastic", "one unit in the last place"]
    least = content["one_unit_in_the_last_place"]
    lines = [
        [what, f"{found:.2g}", f"{least[what]:.2g}"]
        for what, found in content["difference"].items()
    ]
    return [*markdown(headers, lines), "", "One run each."]


def restarts(content: Content) -> list[str]:
    """How far runs whose whole job was killed are from those that were not."""
    headers = ["parts have", "kills", "damaged checkpoints", "pairs of N and K"]
    return markdown(
        [*headers, "largest difference", "tolerance", "samples exactly once"],
        [
            [
                system,
                *(str(run[key]) for key in ("kills", "damaged_checkpoints", "plans")),
                f"{max(*run['difference_by_epoch'], run['weights_difference']):.2g}",
                f"{run['tolerance']:.2g}",
                "yes" if run["samples_exactly_once"] else "no",
            ]
            for system, run in content["restarts"]["systems"].items()
        ],
    )
