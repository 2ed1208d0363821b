"""What a run did and why, as plain values and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pipetransformer.explanation.document import (
    Section,
    Table,
    columns,
    milliseconds,
    percent,
    seconds,
)
from pipetransformer.explanation.outcomes import (
    Measurement,
    measured_section,
    transition_lines,
)
from pipetransformer.explanation.text import render
from pipetransformer.report import (
    AbortRecord,
    CodecRecord,
    Ending,
    PlanShape,
    RecoveryRecord,
    RefusalRecord,
    Saved,
    TransformationRecord,
    parts_of,
)


@dataclass(frozen=True, kw_only=True)
class RunExplanation:
    """What a run did and why; ``str()`` gives text, :meth:`to_dict` JSON.

    Args:
        world_size: processes.
        total_ns: wall time.
        changes: plans in their order, the first included.
        refusals: changes that were priced and not made.
        phases_ns: the lead's wall time by phase, largest first.
        measured: predicted beside measured steps and pauses.
        aborts: attempts that were aborted.
        recoveries: losses of ranks that the run survived.
        counters: counts of the lead, by name.
        codecs: decisions on the codec of cached activations.
        freezing: what freezing has saved; None where nothing can be compared.
        ended: how the run ended; None while it goes on, and in older summaries.
    """

    world_size: int
    total_ns: int
    changes: tuple[TransformationRecord, ...]
    refusals: tuple[RefusalRecord, ...]
    phases_ns: Mapping[str, int]
    measured: tuple[Measurement, ...]
    aborts: tuple[AbortRecord, ...] = ()
    recoveries: tuple[RecoveryRecord, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    codecs: tuple[CodecRecord, ...] = ()
    freezing: Saved | None = None
    ended: Ending | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the explanation as JSON-ready values."""
        return {
            "version": 1,
            "kind": "run",
            "world_size": self.world_size,
            "total_ns": self.total_ns,
            "changes": [_change_dict(change) for change in self.changes],
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "aborts": [_abort_dict(abort) for abort in self.aborts],
            "recoveries": [_recovery_dict(each) for each in self.recoveries],
            "codecs": [each.to_json() for each in self.codecs],
            "freezing": None if self.freezing is None else self.freezing.to_json(),
            "ended": None if self.ended is None else self.ended.to_json(),
            "counters": dict(self.counters),
            "phases_ns": dict(self.phases_ns),
            "measured": [
                {**asdict(entry), "error": entry.error} for entry in self.measured
            ],
        }

    def sections(self) -> list[Section]:
        """Return the report as sentences and tables, to be drawn."""
        return run_sections(self)

    def __str__(self) -> str:
        """Return the report as plain text."""
        return render(self.sections())


def nanoseconds(spent: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(spent * 1_000_000_000)


def largest_first(phases: Mapping[str, float]) -> dict[str, int]:
    """Return the phases in nanoseconds, largest first, equal ones by name."""
    found = {name: nanoseconds(spent) for name, spent in phases.items()}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _change_dict(change: TransformationRecord) -> dict[str, object]:
    return {
        "epoch": change.epoch,
        "from": _name(change.before),
        "to": str(change.after),
        "reason": change.reason,
        "pause_ns": nanoseconds(change.pause_seconds),
        "phases_ns": largest_first(change.phases),
        "transition": change.to_json()["transition"],
        "moved_bytes": change.moved_bytes,
        "group": change.group,
    }


def _abort_dict(abort: AbortRecord) -> dict[str, object]:
    return {
        "epoch": abort.epoch,
        "wanted": str(abort.wanted),
        "reason": abort.reason,
        "lost_ns": nanoseconds(abort.seconds),
    }


def _recovery_dict(recovery: RecoveryRecord) -> dict[str, object]:
    return {
        "epoch": recovery.epoch,
        "step": recovery.step,
        "lost": list(recovery.lost),
        "pause_ns": nanoseconds(recovery.pause_seconds),
        "phases_ns": largest_first(recovery.phases),
        "from": _name(recovery.before),
        "to": _name(recovery.after),
    }


def _name(shape: PlanShape | None) -> str | None:
    return None if shape is None else str(shape)


def run_sections(run: RunExplanation) -> list[Section]:
    """Return the sections of a run's explanation."""
    found = [
        Section("", (_head(run),)),
        Section("Plans", tuple(line for c in run.changes for line in _lines(c))),
        Section("Refused", tuple(line for r in run.refusals for line in _refused(r))),
        Section("Aborted", tuple(_aborted(abort) for abort in run.aborts)),
        Section("Lost ranks", tuple(x for r in run.recoveries for x in _survived(r))),
        Section("Freezing", () if run.freezing is None else (str(run.freezing),)),
        Section("Activation cache", tuple(str(each) for each in run.codecs)),
        measured_section(run.measured),
        Section("Where the time went", (), _phase_table(run)),
        Section("Counts", _counts(run)),
    ]
    return [section for section in found if section.lines or section.table]


def _head(run: RunExplanation) -> str:
    text = f"run of {run.world_size} processes, {seconds(run.total_ns)}"
    return text if run.ended is None else f"{text}; {run.ended}"


def _lines(change: TransformationRecord) -> list[str]:
    where = f"epoch {change.epoch}: "
    where += "first plan " if change.before is None else f"{change.before} -> "
    lines = [f"{where}{change.after}; pause {_drawn(change.pause_seconds)}"]
    lines.append(f"  {change.reason}")
    priced = change.transition
    if priced is not None:
        lines += [f"  {line}" for line in transition_lines(priced, change.reason)]
        terms = [f"{n} {milliseconds(t)}" for n, t in priced.expected_terms_ns.items()]
        if terms:
            lines.append(f"  predicted: {', '.join(terms)}")
    lines += _measured(change.phases)
    moved = [f"{change.moved_bytes} bytes moved"] if change.moved_bytes else []
    group = [f"{change.group} group"] if change.group else []
    if moved or group:
        lines.append(f"  {', '.join([*moved, *group])}")
    return lines


def _measured(phases: Mapping[str, float]) -> list[str]:
    """Return a line of phases, each with its parts; none if there are none."""
    spent = largest_first(phases)
    shown = []
    for name, inner in parts_of(spent).items():
        if name in spent:
            parts = ", ".join(
                f"{part} {milliseconds(ns)}" for part, ns in inner.items()
            )
            shown.append(f"{name} {milliseconds(spent[name])}")
            shown[-1] += f" ({parts})" if parts else ""
    return [f"  measured: {', '.join(shown)}"] if shown else []


def _survived(recovery: RecoveryRecord) -> list[str]:
    ranks = ", ".join(map(str, recovery.lost)) or "none"
    shapes = f"{recovery.before or 'no plan'} -> {recovery.after or 'no plan'}"
    where = f"epoch {recovery.epoch}, step {recovery.step}: ranks {ranks}; {shapes}"
    pause = f"pause {_drawn(recovery.pause_seconds)}"
    return [f"{where}; {pause}", *_measured(recovery.phases)]


def _aborted(abort: AbortRecord) -> str:
    where = f"before epoch {abort.epoch}: {abort.wanted}"
    return f"{where}; {abort.reason}; {_drawn(abort.seconds)} lost"


def _drawn(spent: float) -> str:
    return milliseconds(nanoseconds(spent))


def _counts(run: RunExplanation) -> tuple[str, ...]:
    shown = (f"{n.replace('_', ' ')} {c}" for n, c in run.counters.items() if c)
    text = ", ".join(shown)
    return (text,) if text else ()


def _refused(refusal: RefusalRecord) -> list[str]:
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
