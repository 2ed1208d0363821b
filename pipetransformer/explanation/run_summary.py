"""Explains a run from its summary: what changed, what it cost, what held."""

from __future__ import annotations

from pipetransformer.core.wire import LONGEST_NAME, check_str
from pipetransformer.explanation import fields
from pipetransformer.explanation.outcomes import Measurement
from pipetransformer.explanation.run import (
    Abort,
    Change,
    Recovery,
    Refusal,
    RunExplanation,
)
from pipetransformer.planner import Transition

_SHAPE = ("num_frozen_layers", "num_stages", "num_replicas", "num_microbatches")
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
    values = fields.read_mapping(summary, "summary")
    first = values.get("first_plan")
    later = fields.read_list(values.get("transformations"), "summary transformations")
    records = [] if first is None else [(first, "summary first_plan")]
    records += [(r, f"summary transformations[{i}]") for i, r in enumerate(later)]
    changes = tuple(_change(record, what) for record, what in records)
    refused = fields.read_list(values.get("refusals", []), "summary refusals")
    aborted = fields.read_list(values.get("aborted", []), "summary aborted")
    losses = fields.read_list(values.get("recoveries", []), "summary recoveries")
    counted = fields.read_mapping(values.get("counters", {}), "summary counters")
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
        aborts=tuple(_abort(r, f"summary aborted[{i}]") for i, r in enumerate(aborted)),
        recoveries=tuple(
            _recovery(r, f"summary recoveries[{i}]") for i, r in enumerate(losses)
        ),
        counters={
            name: fields.read_count(count, f"summary counters {name}")
            for name, count in counted.items()
        },
    )


def _change(record: object, what: str) -> Change:
    values = fields.read_mapping(record, what)
    before, moved = values.get("from"), values.get("transition")
    return Change(
        epoch=fields.read_count(values.get("epoch"), f"{what} epoch"),
        before="" if before is None else _shape(before, f"{what} from"),
        after=_shape(values.get("to"), f"{what} to"),
        reason=check_str(values.get("reason"), f"{what} reason"),
        pause_ns=fields.read_seconds(
            values.get("pause_seconds"), f"{what} pause_seconds"
        ),
        moved_bytes=fields.read_count(
            values.get("moved_bytes", 0), f"{what} moved_bytes"
        ),
        group=check_str(values.get("group", ""), f"{what} group", longest=LONGEST_NAME),
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


def _abort(record: object, what: str) -> Abort:
    values = fields.read_mapping(record, what)
    return Abort(
        epoch=fields.read_count(values.get("epoch"), f"{what} epoch"),
        wanted=_shape(values.get("to"), f"{what} to"),
        reason=check_str(values.get("reason"), f"{what} reason"),
        lost_ns=fields.read_seconds(values.get("seconds"), f"{what} seconds"),
    )


def _recovery(record: object, what: str) -> Recovery:
    values = fields.read_mapping(record, what)
    before, after = values.get("from"), values.get("to")
    lost = fields.read_list(values.get("lost"), f"{what} lost")
    return Recovery(
        epoch=fields.read_count(values.get("epoch"), f"{what} epoch"),
        step=fields.read_count(values.get("step"), f"{what} step"),
        lost=tuple(fields.read_count(rank, f"{what} lost") for rank in lost),
        before="" if before is None else _shape(before, f"{what} from"),
        after="" if after is None else _shape(after, f"{what} to"),
        pause_ns=fields.read_seconds(
            values.get("pause_seconds"), f"{what} pause_seconds"
        ),
        phases_ns=_phases(values.get("phases", {}), f"{what} phases"),
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
