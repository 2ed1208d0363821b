"""What is printed and published of a table of cases."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from _fault_case import Policy
from _fault_checks import Verdict


def summary(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float | int | None]]:
    """Return per fault: cases, failed ones, median and longest time to the outcome."""
    found: dict[str, dict[str, float | int | None]] = {}
    for fault in dict.fromkeys(v.case.fault for v in verdicts):
        mine = [v for v in verdicts if v.case.fault == fault]
        waits = [v for v in mine if not _nobody_waited(v)]
        times = [v.seconds for v in waits if v.seconds is not None]
        found[fault] = {
            "cases": len(mine),
            "failed": sum(bool(v.problems) for v in mine),
            "median_s": statistics.median(times) if times else None,
            "max_s": max(times, default=None),
            "checkpoints": sum(v.checkpoints for v in mine),
        }
    return found


def _nobody_waited(verdict: Verdict) -> bool:
    """A lost store holds up nobody who finishes under the plan in force."""
    lost = verdict.case.fault in ("store killed", "store stopped")
    return lost and "finished" in verdict.outcome


def case_rows(verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    """Return one plain record per case."""
    return [
        {
            "point": v.case.point,
            "fault": v.case.fault,
            "role": v.case.role,
            "world_size": v.case.world_size,
            "between": v.case.between,
            "outcome": v.outcome,
            "seconds": v.seconds,
            "checkpoints": v.checkpoints,
            "problems": list(v.problems),
        }
        for v in verdicts
    ]


def document(
    verdicts: Sequence[Verdict], policy: Policy, settings: Mapping[str, object]
) -> str:
    """Return the whole table as Markdown."""
    failed = sum(bool(v.problems) for v in verdicts)
    told = ", ".join(f"{name} {value}" for name, value in settings.items())
    lines = [
        f'# Injected faults, `on_peer_failure="{policy}"`',
        "",
        f"{len(verdicts)} cases, {failed} failed. {told}. Columns: METRICS.md.",
        "",
        "| fault | cases | failed | median s | max s | checkpoints |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for fault, row in summary(verdicts).items():
        times = " | ".join(_seconds(row[key]) for key in ("median_s", "max_s"))
        lines.append(
            f"| {fault} | {row['cases']} | {row['failed']} | {times} "
            f"| {row['checkpoints']} |"
        )
    lines += [
        "",
        "| point | fault | role | ranks | plans change between | "
        "outcome of the survivors | s | problems |",
        "|---|---|---|---:|---|---|---:|---|",
    ]
    for v in verdicts:
        problems = "; ".join(v.problems).replace("|", "/")
        lines.append(
            f"| {v.case.point} | {v.case.fault} | {v.case.role} | {v.case.world_size} "
            f"| {v.case.between} | {v.outcome} | {_seconds(v.seconds)} | {problems} |"
        )
    return "\n".join(lines) + "\n"


def _seconds(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.2f}"
