"""A run as text for people: one line per event, one closing table."""

from __future__ import annotations

from collections.abc import Mapping

from pipetransformer.core.text_columns import aligned
from pipetransformer.report.epochs import EpochRecord
from pipetransformer.report.history import History
from pipetransformer.report.phases import parts_of
from pipetransformer.report.transformations import (
    AbortRecord,
    RecoveryRecord,
    RefusalRecord,
    TransformationRecord,
)

_COLUMNS = (
    "epoch",
    "frozen",
    "K",
    "R",
    "M",
    "samples/s",
    "ms/step",
    "predicted",
    "pace",
    "hits",
    "loss",
    "accuracy",
)
_PHASE_ORDER = (
    "notice",
    "roll_call",
    "plan",
    "prepare",
    "move",
    "rewire",
)


def _milliseconds(seconds: float) -> str:
    # Most parts take a few milliseconds, a first plan some hundred.
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:.0f}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _phase_texts(phases: Mapping[str, float]) -> str:
    """Return the pause's phases: neither ``ahead`` nor ``first_step`` is in it."""
    return ", ".join(_phase_text(n, phases) for n in _PHASE_ORDER if n in phases)


def _phase_text(name: str, phases: Mapping[str, float]) -> str:
    inner = parts_of(phases)[name].items()
    parts = ", ".join(f"{part} {_milliseconds(spent)}" for part, spent in inner)
    text = f"{name} {_milliseconds(phases[name])}"
    return f"{text} ({parts})" if parts else text


def price_text(record: TransformationRecord) -> str:
    """Return the pause, its phases in ms, the bytes moved and the group's origin."""
    texts = [f"pause {1000 * record.pause_seconds:.0f} ms"]
    phases = _phase_texts(record.phases)
    if phases:
        texts[0] += f": {phases}"
    if "ahead" in record.phases:
        texts.append(f"before it {_phase_text('ahead', record.phases)}")
    if record.moved_bytes:
        texts.append(f"{_size(record.moved_bytes)} moved")
    if record.group:
        texts.append(f"{record.group} group")
    if record.attempt:
        texts.append(f"after {record.attempt} aborted attempts")
    return "; ".join(texts)


def transformation_line(record: TransformationRecord) -> str:
    """Return one line: what changed, why, and what it cost."""
    where, price = f"epoch {record.epoch}", price_text(record)
    if record.before is None:
        return f"[{where}] first plan: {record.after}; {record.reason}; {price}"
    return (
        f"[{where}] transformation: {record.before} -> {record.after}; "
        f"{record.reason}; {price}"
    )


def abort_line(record: AbortRecord) -> str:
    """Return one line: what was tried, why it was aborted, and what that took."""
    without = f" without ranks {list(record.without)}" if record.without else ""
    return (
        f"[epoch {record.epoch}] plan epoch {record.plan_epoch} was aborted, the old "
        f"plan goes on: {record.wanted}{without}; {record.reason}; "
        f"{1000 * record.seconds:.0f} ms: {_phase_texts(record.phases)}"
    )


def first_step_line(plan_epoch: int, seconds: float) -> str:
    """Return one line: what the first step after a change took more than others."""
    return (
        f"plan epoch {plan_epoch}: its first step took {_milliseconds(seconds)} ms "
        "more than the others"
    )


def recovery_line(record: RecoveryRecord) -> str:
    """Return one line: who was lost, what goes on, and what it cost."""
    return (
        f"[epoch {record.epoch}] {record.what} at step {record.step}: "
        f"{record.before or 'no plan'} -> {record.after or 'no plan'}; "
        f"pause {1000 * record.pause_seconds:.0f} ms: {_phase_texts(record.phases)}"
    )


def refusal_line(record: RefusalRecord) -> str:
    """Return one line: what was not worth it, and the rule that refused."""
    return f"[epoch {record.epoch}] not taken: {record.transition.rule}"


def _rate(record: EpochRecord) -> float:
    return record.samples / record.seconds if record.seconds > 0 else 0.0


def epoch_line(record: EpochRecord) -> str:
    """Return one line: how a pass went."""
    cached = record.cache_hits + record.cache_misses
    hits = f", cache hits {record.cache_hits}/{cached}" if cached else ""
    kinds = {"changed": "of other inputs", "stale": "of another prefix"}
    kinds |= {"corrupt": "corrupt", "late": "late from disk"}
    misses = [f"{record.cache[k]} {t}" for k, t in kinds.items() if record.cache.get(k)]
    if full := record.cache.get("full"):
        misses.append(f"{full} without room")
    hits += f" ({', '.join(misses)})" if misses else ""
    if used := record.cache.get("bytes"):
        hits += f" in {used / 1e6:.0f} MB"
    if copied := record.cache.get("device_hits"):
        hits += f", {copied} of them from copies on devices"
    if used := record.cache.get("disk_bytes"):
        hits += f", {record.cache.get('disk_hits', 0)} of them on disk in "
        hits += f"{used / 1e6:.0f} MB"
        if busy := record.cache.get("disk_read_ns"):
            rate = record.cache.get("disk_read_bytes", 0) / busy
            hits += f" at {rate:.{1 if rate >= 1 else 3}f} GB/s"
    if rows := record.cache.get("recomputed"):
        hits += f", frozen layers run for {rows}, which is cheaper than reading"
    return (
        f"[epoch {record.epoch}] {record.shape}: loss {record.train_loss:.4f}, "
        f"{record.samples} samples in {record.seconds:.1f} s "
        f"({_rate(record):.0f}/s){hits}"
    )


def _row(record: EpochRecord) -> list[str]:
    shape = record.shape
    accuracy = record.metrics.get("accuracy")
    return [
        str(record.epoch),
        str(shape.num_frozen_layers),
        str(shape.num_stages),
        str(shape.num_replicas),
        str(shape.num_microbatches),
        f"{_rate(record):.0f}",
        f"{record.measured_step_ns / 1e6:.1f}",
        f"{record.predicted_step_ns / 1e6:.1f}" if record.predicted_step_ns else "-",
        f"{record.pace:.2f}",
        str(record.cache_hits),
        f"{record.train_loss:.4f}",
        "-" if accuracy is None else f"{100 * accuracy:.2f} %",
    ]


def closing_table(history: History) -> str:
    """Return the table of all epochs: plan, speed, cache, loss, accuracy.

    ``ms/step`` is the wall time of an optimizer step, ``predicted`` what was expected
    of it: the simulated time times ``pace``, which earlier passes took over theirs.
    """
    rows = [_COLUMNS, *(_row(record) for record in history.epochs)]
    return "\n".join(aligned(rows, rule=True))
