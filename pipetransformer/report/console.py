"""A run as text for people: one line per event, one closing table."""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.report.history import (
    EpochRecord,
    History,
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
    "simulated",
    "hits",
    "loss",
    "accuracy",
)


def transformation_line(record: TransformationRecord) -> str:
    """Return one line: what changed, why, and what it cost."""
    where = f"epoch {record.epoch}"
    price = f"pause {1000 * record.pause_seconds:.0f} ms"
    if record.before is None:
        return f"[{where}] first plan: {record.after}; {record.reason}; {price}"
    return (
        f"[{where}] transformation: {record.before} -> {record.after}; "
        f"{record.reason}; {price}"
    )


def refusal_line(record: RefusalRecord) -> str:
    """Return one line: what was not worth it, and the rule that refused."""
    return f"[epoch {record.epoch}] not taken: {record.transition['rule']}"


def _rate(record: EpochRecord) -> float:
    return record.samples / record.seconds if record.seconds > 0 else 0.0


def epoch_line(record: EpochRecord) -> str:
    """Return one line: how a pass went."""
    cached = record.cache_hits + record.cache_misses
    hits = f", cache hits {record.cache_hits}/{cached}" if cached else ""
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
        str(record.cache_hits),
        f"{record.train_loss:.4f}",
        "-" if accuracy is None else f"{100 * accuracy:.2f} %",
    ]


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        lines.append("  ".join(cells))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def closing_table(history: History) -> str:
    """Return the table of all epochs: plan, speed, cache, loss, accuracy.

    ``ms/step`` is the wall time of an optimizer step, ``simulated`` what the planner's
    simulator gave its forward and backward.
    """
    return _align([list(_COLUMNS), *(_row(record) for record in history.epochs)])
