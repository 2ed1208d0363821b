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
from pipetransformer.planner import Transition


@dataclass(frozen=True, kw_only=True)
class Change:
    """A plan that came into force.

    Args:
        epoch: the training epoch that it precedes.
        before: the plan before it, such as ``"frozen 4, K=2, R=2, M=4"``; empty for
            the run's first.
        after: the plan.
        reason: why, from the run.
        pause_ns: measured, from the decision to the rewired pipeline.
        phases_ns: the measured parts of the pause, largest first; a name such as
            ``"prepare/group"`` is a part of another one.
        transition: what was predicted and which rule decided; None where nothing
            was.
        moved_bytes: state that new replicas were given.
        group: where the replicas' group is from; empty if it is not known.
    """

    epoch: int
    before: str
    after: str
    reason: str
    pause_ns: int
    phases_ns: Mapping[str, int]
    transition: Transition | None = None
    moved_bytes: int = 0
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A change of plan that was priced and not made.

    Args:
        epoch: the training epoch that it would have preceded.
        transition: what it would have cost, and the rule that refused.
    """

    epoch: int
    transition: Transition


@dataclass(frozen=True, kw_only=True)
class Abort:
    """One attempt at a change of plan that was aborted; the old plan went on.

    Args:
        epoch: the training epoch that it would have preceded.
        wanted: the plan.
        reason: why it was aborted.
        lost_ns: what it took.
    """

    epoch: int
    wanted: str
    reason: str
    lost_ns: int


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The loss of ranks that the run survived.

    Args:
        epoch: the training epoch that it fell into.
        step: optimizer steps done then.
        lost: their numbers.
        before: the plan in force, as in `Change`; empty on a standby, and before the
            first plan.
        after: the survivors' plan; empty on a standby, and where the first plan is
            still to be made.
        pause_ns: measured, from the failure to the rewired pipeline.
        phases_ns: the measured parts of the pause, largest first.
    """

    epoch: int
    step: int
    lost: tuple[int, ...]
    before: str
    after: str
    pause_ns: int
    phases_ns: Mapping[str, int]


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
    """

    world_size: int
    total_ns: int
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    phases_ns: Mapping[str, int]
    measured: tuple[Measurement, ...]
    aborts: tuple[Abort, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return the explanation as JSON-ready values."""
        return {
            "version": 1,
            "kind": "run",
            "world_size": self.world_size,
            "total_ns": self.total_ns,
            "changes": [_change_dict(change) for change in self.changes],
            "refusals": [
                {"epoch": each.epoch, "transition": each.transition.to_dict()}
                for each in self.refusals
            ],
            "aborts": [asdict(abort) for abort in self.aborts],
            "recoveries": [_recovery_dict(each) for each in self.recoveries],
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


def _recovery_dict(recovery: Recovery) -> dict[str, object]:
    values = asdict(recovery)
    shapes = {"from": values.pop("before") or None, "to": values.pop("after") or None}
    return {**values, **shapes, "lost": list(recovery.lost)}


def _change_dict(change: Change) -> dict[str, object]:
    moved = change.transition
    return {
        "epoch": change.epoch,
        "from": change.before or None,
        "to": change.after,
        "reason": change.reason,
        "pause_ns": change.pause_ns,
        "phases_ns": dict(change.phases_ns),
        "transition": None if moved is None else moved.to_dict(),
        "moved_bytes": change.moved_bytes,
        "group": change.group,
    }


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
