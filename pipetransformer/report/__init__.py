"""Room ``report``: what a run did, for people and for programs."""

from pipetransformer.report.clock import Clock
from pipetransformer.report.console import (
    closing_table,
    epoch_line,
    refusal_line,
    transformation_line,
)
from pipetransformer.report.counters import Counters
from pipetransformer.report.history import (
    EpochRecord,
    History,
    PlanShape,
    RefusalRecord,
    TransformationRecord,
    write_summary,
)
from pipetransformer.report.phases import Phases, parts_of
from pipetransformer.report.ranges import profiled

__all__ = [
    "Clock",
    "Counters",
    "EpochRecord",
    "History",
    "Phases",
    "PlanShape",
    "RefusalRecord",
    "TransformationRecord",
    "closing_table",
    "epoch_line",
    "parts_of",
    "profiled",
    "refusal_line",
    "transformation_line",
    "write_summary",
]
