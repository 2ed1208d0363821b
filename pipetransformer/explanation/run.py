"""Explains a run from its summary: what changed, what it cost, what held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pipetransformer.explanation import fields
from pipetransformer.explanation.document import (
    Section,
    Table,
    columns,
    milliseconds,
    percent,
    seconds,
)
from pipetransformer.explanation.outcomes import measured_table, transition_lines
from pipetransformer.explanation.report import Measurement
from pipetransformer.explanation.text import render
from pipetransformer.planner import Transition

_SHAPE = ("num_frozen_layers", "num_stages", "num_replicas", "num_microbatches")
_AFTERWARDS = "first_step"  # the only phase that is no part of the measured pause


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
        phases_ns: the measured parts of the pause.
        transition: what was predicted and which rule decided; None where nothing
            was.
    """

    epoch: int
    before: str
    after: str
    reason: str
    pause_ns: int
    phases_ns: Mapping[str, int]
    transition: Transition | None = None


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
class RunExplanation:
    """What a run did and why; ``str()`` gives text, :meth:`to_dict` JSON.

    Args:
        world_size: processes.
        total_ns: wall time.
        changes: plans in their order, the first included.
        refusals: changes that were priced and not made.
        phases_ns: the lead's wall time by phase, largest first.
        measured: predicted beside measured steps and pauses.
    """

    world_size: int
    total_ns: int
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    phases_ns: Mapping[str, int]
    measured: tuple[Measurement, ...]

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
    }


def explain_run(summary: object) -> RunExplanation:
    """Read a run's summary, as ``report.write_summary`` wrote it.

    Args:
        summary: the parsed JSON.

    Returns:
        The explanation.

    Raises:
        ValueError: it is no summary; the text names the field.
    """
    values = fields.read_mapping(summary, "summary")
    first = values.get("first_plan")
    later = fields.read_list(values.get("transformations"), "summary transformations")
    records = [] if first is None else [(first, "summary first_plan")]
    records += [(r, f"summary transformations[{i}]") for i, r in enumerate(later)]
    changes = tuple(_change(record, what) for record, what in records)
    refused = fields.read_list(values.get("refusals", []), "summary refusals")
    epochs = fields.read_list(values.get("epochs"), "summary epochs")
    steps = [_step(e, f"summary epochs[{i}]") for i, e in enumerate(epochs)]
    return RunExplanation(
        world_size=fields.read_count(values.get("world_size"), "summary world_size"),
        total_ns=fields.read_seconds(
            values.get("total_seconds"), "summary total_seconds"
        ),
        changes=changes,
        refusals=tuple(
            _refusal(r, f"summary refusals[{i}]") for i, r in enumerate(refused)
        ),
        phases_ns=_phases(values.get("phase_seconds", {}), "summary phase_seconds"),
        measured=(
            *(step for step in steps if step is not None),
            *(entry for change in changes for entry in _pauses(change)),
        ),
    )


def _change(record: object, what: str) -> Change:
    values = fields.read_mapping(record, what)
    before, moved = values.get("from"), values.get("transition")
    return Change(
        epoch=fields.read_count(values.get("epoch"), f"{what} epoch"),
        before="" if before is None else _shape(before, f"{what} from"),
        after=_shape(values.get("to"), f"{what} to"),
        reason=fields.read_text(values.get("reason"), f"{what} reason"),
        pause_ns=fields.read_seconds(
            values.get("pause_seconds"), f"{what} pause_seconds"
        ),
        phases_ns=_phases(values.get("phases", {}), f"{what} phases"),
        transition=(
            None if moved is None else _transition(moved, f"{what} transition")
        ),
    )


def _refusal(record: object, what: str) -> Refusal:
    values = fields.read_mapping(record, what)
    return Refusal(
        epoch=fields.read_count(values.get("epoch"), f"{what} epoch"),
        transition=_transition(values.get("transition"), f"{what} transition"),
    )


def _transition(value: object, what: str) -> Transition:
    try:
        return Transition.from_dict(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _shape(value: object, what: str) -> str:
    values = fields.read_mapping(value, what)
    frozen, k, r, m = (
        fields.read_count(values.get(name), f"{what} {name}") for name in _SHAPE
    )
    return f"frozen {frozen}, K={k}, R={r}, M={m}"


def _phases(value: object, what: str) -> dict[str, int]:
    spent = {
        name: fields.read_seconds(entry, f"{what} {name}")
        for name, entry in fields.read_mapping(value, what).items()
    }
    return dict(sorted(spent.items(), key=lambda item: (-item[1], item[0])))


def _step(record: object, what: str) -> Measurement | None:
    values = fields.read_mapping(record, what)
    epoch = fields.read_count(values.get("epoch"), f"{what} epoch")
    passed = fields.read_seconds(values.get("seconds"), f"{what} seconds")
    steps = fields.read_count(values.get("optimizer_steps"), f"{what} optimizer_steps")
    predicted = fields.read_count(
        values.get("predicted_step_ns", 0), f"{what} predicted_step_ns"
    )
    if steps == 0:
        return None
    return Measurement(
        what=f"step of epoch {epoch} ({_shape(values, what)})",
        predicted_ns=predicted or None,
        measured_ns=passed // steps,
    )


def _pauses(change: Change) -> list[Measurement]:
    """Return the pause with what the first step took more, then by term."""
    expected = {} if change.transition is None else change.transition.expected_terms_ns
    where = f"before epoch {change.epoch}"
    whole = Measurement(
        what=f"pause {where}",
        predicted_ns=sum(expected.values()) if expected else None,
        measured_ns=change.pause_ns + change.phases_ns.get(_AFTERWARDS, 0),
    )
    terms = [
        Measurement(
            what=f"{term} {where}",
            predicted_ns=predicted,
            measured_ns=change.phases_ns[term],
        )
        for term, predicted in expected.items()
        if term in change.phases_ns
    ]
    return [whole, *terms]


def run_sections(run: RunExplanation) -> list[Section]:
    """Return the sections of a run's explanation."""
    found = [
        Section("", (f"run of {run.world_size} processes, {seconds(run.total_ns)}",)),
        Section("Plans", tuple(line for c in run.changes for line in _lines(c))),
        Section("Refused", tuple(line for r in run.refusals for line in _refused(r))),
        Section("Predicted against measured", (), measured_table(run.measured)),
        Section("Where the time went", (), _phase_table(run)),
    ]
    return [section for section in found if section.lines or section.table]


def _lines(change: Change) -> list[str]:
    where = f"epoch {change.epoch}: "
    where += f"{change.before} -> " if change.before else "first plan "
    lines = [f"{where}{change.after}; pause {milliseconds(change.pause_ns)}"]
    lines.append(f"  {change.reason}")
    moved = change.transition
    if moved is not None:
        lines += [f"  {line}" for line in transition_lines(moved)]
        terms = [f"{n} {milliseconds(t)}" for n, t in moved.expected_terms_ns.items()]
        if terms:
            lines.append(f"  predicted: {', '.join(terms)}")
    parts = [f"{name} {milliseconds(ns)}" for name, ns in change.phases_ns.items()]
    if parts:
        lines.append(f"  measured: {', '.join(parts)}")
    return lines


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
