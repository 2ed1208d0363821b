"""Room ``report``: what a run did, for people and for programs."""

from pipetransformer.report.clock import Clock
from pipetransformer.report.console import (
    closing_table,
    epoch_line,
    refusal_line,
    transformation_line,
)
from pipetransformer.report.history import (
    EpochRecord,
    History,
    PlanShape,
    RefusalRecord,
    TransformationRecord,
    write_summary,
)

__all__ = [
    "Clock",
    "EpochRecord",
    "History",
    "PlanShape",
    "RefusalRecord",
    "TransformationRecord",
    "closing_table",
    "epoch_line",
    "refusal_line",
    "transformation_line",
    "write_summary",
]
