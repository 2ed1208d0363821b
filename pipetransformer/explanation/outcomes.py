"""The sections about changes of plan, and about predictions beside measurements."""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.explanation.document import (
    Section,
    Table,
    columns,
    counted,
    milliseconds,
)
from pipetransformer.planner import Plan, Transition


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A prediction beside what happened.

    Args:
        what: such as ``"step of epoch 3"`` or ``"pause before epoch 4"``.
        predicted_ns: None where nothing was predicted.
        measured_ns: wall time.
    """

    what: str
    predicted_ns: int | None
    measured_ns: int

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where that means nothing."""
        if self.predicted_ns is None or self.measured_ns <= 0:
            return None
        return (self.predicted_ns - self.measured_ns) / self.measured_ns


def transition(plan: Plan) -> Section:
    """What the change to this plan costs and wins, term by term."""
    change = plan.transition
    if change is None:
        return Section("Transition")
    lines = transition_lines(change)
    return Section("Transition", lines, _transition_table(change))


def transition_lines(change: Transition, told: str = "") -> tuple[str, ...]:
    """Return what was priced, the rule that decided, and when it pays back.

    Args:
        change: A change that was accepted without a gain (a boundary that moves, a
            shape that cannot go on) was not made for one: nothing is said of it.
        told: What has been said before; a rule in it is not said again.
    """
    verdict = "accepted" if change.accepted else "refused"
    offered = f" to {change.offered}" if change.offered else ""
    rule = "" if change.rule in told else f": {change.rule}"
    first = f"change of {change.kind}{offered}, {verdict}{rule}"
    if change.accepted and not change.gain_ns_per_step:
        return (first,)
    pay_back = "does not pay back"
    if change.pay_back_steps is not None:
        pay_back = f"pays back after {counted(change.pay_back_steps, 'step')}"
    return (
        first,
        f"gain {milliseconds(change.gain_ns_per_step)} a step over "
        f"{counted(change.remaining_steps, 'step')} left; {pay_back}",
    )


def _transition_table(change: Transition) -> Table | None:
    if not change.terms_ns:
        return None
    anyway = change.anyway_terms_ns
    rows = [
        (name, milliseconds(ns), milliseconds(anyway.get(name)))
        for name, ns in change.terms_ns.items()
    ]
    total = sum(anyway.values()) if anyway else None
    rows.append(("pause", milliseconds(change.pause_ns), milliseconds(total)))
    head = columns("term, this change, new boundary alone", term="word")
    return Table(head, tuple(rows))


def measured_section(measured: tuple[Measurement, ...]) -> Section:
    """Predicted beside measured, one row per measurement; empty without any."""
    title = "Predicted against measured"
    if not measured:
        return Section(title)
    rows = tuple(
        (
            entry.what,
            milliseconds(entry.predicted_ns),
            milliseconds(entry.measured_ns),
            "-" if entry.error is None else f"{100 * entry.error:+.1f} %",
        )
        for entry in measured
    )
    table = Table(columns("what, predicted, measured, error", what="word"), rows)
    held = [
        "a predicted step also holds optimizer, loading and work of the process, as "
        "far as they were measured; a measured one all that the script does in it, too",
    ]
    if any(entry.what.startswith("pause") for entry in measured):
        held.append("a pause here also holds what the first step after it took longer")
    return Section(title, tuple(held), table)
