"""What is printed and published of a table of cases."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from faults.case import Case, Policy
from faults.checks import Verdict


def summary(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float | int | None]]:
    """Return per fault: cases, attempts, failed and skipped ones, and times.

    Times are the median and the longest one to the outcome, in seconds; `unnamed`
    counts the survivors whose failure named nobody.
    """
    found: dict[str, dict[str, float | int | None]] = {}
    for fault in dict.fromkeys(v.case.fault for v in verdicts):
        mine = [v for v in verdicts if v.case.fault == fault]
        waits = [v for v in mine if not _nobody_waited(v)]
        times = [v.seconds for v in waits if v.seconds is not None]
        found[fault] = {
            "cases": len({v.case for v in mine}),
            "attempts": sum(not v.skipped for v in mine),
            "skipped": sum(v.skipped for v in mine),
            "failed": sum(bool(v.problems) for v in mine),
            "median_s": statistics.median(times) if times else None,
            "max_s": max(times, default=None),
            "checkpoints": sum(v.checkpoints for v in mine),
            "unnamed": sum(v.unnamed for v in mine),
        }
    return found


def _nobody_waited(verdict: Verdict) -> bool:
    """A lost store holds up nobody who finishes under the plan in force."""
    lost = verdict.case.fault in ("store killed", "store stopped")
    return lost and "finished" in verdict.outcome


def case_rows(verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    """Return one plain record per case, with what each attempt at it gave."""
    return [
        {
            "point": case.point,
            "fault": case.fault,
            "role": case.role,
            "second": case.second,
            "world_size": case.world_size,
            "between": case.between,
            "outcome": _outcomes(mine),
            "why": "; ".join(dict.fromkeys(v.why for v in mine)),
            "attempts": sum(not v.skipped for v in mine),
            "failed": sum(bool(v.problems) for v in mine),
            "seconds": [v.seconds for v in mine],
            "checkpoints": sum(v.checkpoints for v in mine),
            "problems": [problem for v in mine for problem in v.problems],
        }
        for case, mine in _by_case(verdicts)
    ]


def _by_case(verdicts: Sequence[Verdict]) -> list[tuple[Case, list[Verdict]]]:
    found: dict[Case, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.case, []).append(verdict)
    return list(found.items())


def _outcomes(verdicts: Sequence[Verdict]) -> str:
    """Return how attempts ended; how many of each where they differ."""
    kinds = Counter(v.outcome for v in verdicts)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{count} x {text}" for text, count in kinds.most_common())


def document(
    verdicts: Sequence[Verdict], policy: Policy, settings: Mapping[str, object]
) -> str:
    """Return the whole table as Markdown."""
    failed = sum(bool(v.problems) for v in verdicts)
    told = ", ".join(f"{name} {value}" for name, value in settings.items())
    lines = [
        f'# Injected faults, `on_peer_failure="{policy}"`',
        "",
        f"{len(_by_case(verdicts))} cases, {len(verdicts)} attempts, {failed} failed. "
        f"{told}. Columns: METRICS.md.",
        "",
        "| fault | cases | attempts | skipped | failed | median s | max s "
        "| checkpoints | named nobody |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for fault, row in summary(verdicts).items():
        counts = " | ".join(
            str(row[k]) for k in ("cases", "attempts", "skipped", "failed")
        )
        times = " | ".join(_seconds(row[key]) for key in ("median_s", "max_s"))
        rest = f"{row['checkpoints']} | {row['unnamed']}"
        lines.append(f"| {fault} | {counts} | {times} | {rest} |")
    lines += [
        "",
        "| point | fault | role | ranks | plans change between | attempts | "
        "outcome of the survivors | right, because | longest s | problems |",
        "|---|---|---|---:|---|---:|---|---|---:|---|",
    ]
    lines += [_case_line(row) for row in case_rows(verdicts)]
    return "\n".join(lines) + "\n"


def _case_line(row: Mapping[str, Any]) -> str:
    role = row["role"] + (f" and {row['second']}" if row["second"] else "")
    times = [seconds for seconds in row["seconds"] if seconds is not None]
    problems = "; ".join(row["problems"]).replace("|", "/").replace("\n", " ")
    cells = (
        row["point"],
        row["fault"],
        role,
        row["world_size"],
        row["between"],
        row["attempts"],
        row["outcome"],
        row["why"],
        _seconds(max(times, default=None)),
        problems,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _seconds(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.2f}"
