"""A run's explanation as sentences and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipetransformer.explanation.document import (
    Section,
    Table,
    columns,
    milliseconds,
    percent,
    seconds,
)
from pipetransformer.explanation.outcomes import measured_section, transition_lines

if TYPE_CHECKING:
    from pipetransformer.explanation.run import (
        Abort,
        Change,
        Recovery,
        Refusal,
        RunExplanation,
    )


def run_sections(run: RunExplanation) -> list[Section]:
    """Return the sections of a run's explanation."""
    found = [
        Section("", (f"run of {run.world_size} processes, {seconds(run.total_ns)}",)),
        Section("Plans", tuple(line for c in run.changes for line in _lines(c))),
        Section("Refused", tuple(line for r in run.refusals for line in _refused(r))),
        Section("Aborted", tuple(_aborted(abort) for abort in run.aborts)),
        Section("Lost ranks", tuple(x for r in run.recoveries for x in _survived(r))),
        measured_section(run.measured),
        Section("Where the time went", (), _phase_table(run)),
        Section("Counts", _counts(run)),
    ]
    return [section for section in found if section.lines or section.table]


def _lines(change: Change) -> list[str]:
    where = f"epoch {change.epoch}: "
    where += f"{change.before} -> " if change.before else "first plan "
    lines = [f"{where}{change.after}; pause {milliseconds(change.pause_ns)}"]
    lines.append(f"  {change.reason}")
    priced = change.transition
    if priced is not None:
        lines += [f"  {line}" for line in transition_lines(priced)]
        terms = [f"{n} {milliseconds(t)}" for n, t in priced.expected_terms_ns.items()]
        if terms:
            lines.append(f"  predicted: {', '.join(terms)}")
    lines += _measured(change.phases_ns)
    moved = [f"{change.moved_bytes} bytes moved"] if change.moved_bytes else []
    group = [f"{change.group} group"] if change.group else []
    if moved or group:
        lines.append(f"  {', '.join([*moved, *group])}")
    return lines


def _measured(phases_ns: Mapping[str, int]) -> list[str]:
    """Return a line of phases, each with its parts; none if there are none."""
    within: dict[str, list[str]] = {}
    for name, ns in phases_ns.items():
        outer, slash, part = name.partition("/")
        if slash:
            within.setdefault(outer, []).append(f"{part} {milliseconds(ns)}")
    shown = [
        f"{name} {milliseconds(ns)}"
        + (f" ({', '.join(within[name])})" if name in within else "")
        for name, ns in phases_ns.items()
        if "/" not in name
    ]
    return [f"  measured: {', '.join(shown)}"] if shown else []


def _survived(recovery: Recovery) -> list[str]:
    ranks = ", ".join(map(str, recovery.lost)) or "none"
    shapes = f"{recovery.before or 'no plan'} -> {recovery.after or 'no plan'}"
    where = f"epoch {recovery.epoch}, step {recovery.step}: ranks {ranks}; {shapes}"
    pause = f"pause {milliseconds(recovery.pause_ns)}"
    return [f"{where}; {pause}", *_measured(recovery.phases_ns)]


def _aborted(abort: Abort) -> str:
    where = f"before epoch {abort.epoch}: {abort.wanted}"
    return f"{where}; {abort.reason}; {milliseconds(abort.lost_ns)} lost"


def _counts(run: RunExplanation) -> tuple[str, ...]:
    shown = (f"{n.replace('_', ' ')} {c}" for n, c in run.counters.items() if c)
    text = ", ".join(shown)
    return (text,) if text else ()


def _refused(refusal: Refusal) -> list[str]:
    lines = transition_lines(refusal.transition)
    return [f"before epoch {refusal.epoch}:", *(f"  {line}" for line in lines)]


def _phase_table(run: RunExplanation) -> Table | None:
    if not run.phases_ns or not run.total_ns:
        return None
    rows = tuple(
        (name, seconds(ns), percent(ns / run.total_ns))
        for name, ns in run.phases_ns.items()
    )
    return Table(columns("phase, time, share", phase="word"), rows)
