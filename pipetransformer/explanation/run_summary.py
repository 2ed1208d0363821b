"""Explains a run from its summary: what changed, what it cost, what held."""

from __future__ import annotations

from pipetransformer.core.wire import Fields, check_int, check_seconds
from pipetransformer.explanation.outcomes import Measurement
from pipetransformer.explanation.run import (
    RunExplanation,
    largest_first,
    nanoseconds,
)
from pipetransformer.report import (
    AbortRecord,
    CodecRecord,
    Ending,
    PlanShape,
    RecoveryRecord,
    RefusalRecord,
    Saved,
    TransformationRecord,
)

_AFTERWARDS = "first_step"  # the only phase that is no part of the measured pause


def explain_run(summary: object) -> RunExplanation:
    """Read a run's summary, as ``report.write_summary`` wrote it.

    Args:
        summary: the parsed JSON.

    Returns:
        The explanation.

    Raises:
        ValueError: it is no summary; the text names the field.
    """
    fields = Fields(summary, "summary")
    first = fields.read_or_none("first_plan", TransformationRecord.from_json)
    later = fields.read_tuple("transformations", TransformationRecord.from_json)
    changes = later if first is None else (first, *later)
    steps = fields.read_tuple("epochs", _step)
    return RunExplanation(
        world_size=fields.read("world_size", check_int),
        total_ns=nanoseconds(fields.read("total_seconds", check_seconds)),
        changes=changes,
        refusals=fields.read_tuple("refusals", RefusalRecord.from_json, ()),
        phases_ns=largest_first(fields.read_mapping("phase_seconds", check_seconds)),
        measured=(
            *(step for step in steps if step is not None),
            *(entry for change in changes for entry in _pauses(change)),
        ),
        aborts=fields.read_tuple("aborted", AbortRecord.from_json, ()),
        recoveries=fields.read_tuple("recoveries", RecoveryRecord.from_json, ()),
        counters=fields.read_mapping("counters", check_int),
        codecs=fields.read_tuple("codecs", CodecRecord.from_json, ()),
        freezing=fields.read_or_none("freezing", Saved.from_json),
        ended=fields.read_or_none("ended", Ending.from_json),
    )


def _step(record: object, what: str) -> Measurement | None:
    fields = Fields(record, what)
    epoch = fields.read("epoch", check_int)
    passed = nanoseconds(fields.read("seconds", check_seconds))
    steps = fields.read("optimizer_steps", check_int)
    predicted = fields.read("predicted_step_ns", check_int, 0)
    if steps == 0:
        return None
    return Measurement(
        what=f"step of epoch {epoch} ({PlanShape.from_json(record, what)})",
        predicted_ns=predicted or None,
        measured_ns=passed // steps,
    )


def _pauses(change: TransformationRecord) -> list[Measurement]:
    """Return the pause with what the first step took more, then by term."""
    expected = {} if change.transition is None else change.transition.expected_terms_ns
    where = f"before epoch {change.epoch}"
    spent = {name: nanoseconds(each) for name, each in change.phases.items()}
    whole = Measurement(
        what=f"pause {where}",
        predicted_ns=sum(expected.values()) if expected else None,
        measured_ns=nanoseconds(change.pause_seconds) + spent.get(_AFTERWARDS, 0),
    )
    terms = [
        Measurement(
            what=f"{term} {where}",
            predicted_ns=predicted,
            measured_ns=spent[term],
        )
        for term, predicted in expected.items()
        if term in spent
    ]
    return [whole, *terms]
