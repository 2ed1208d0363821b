"""Room ``report``: what a run did, for people and for programs."""

from pipetransformer.report.callbacks import (
    Callback,
    CsvWriter,
    Listeners,
    ProgressBar,
    StepRecord,
    TensorBoardWriter,
    WandbWriter,
)
from pipetransformer.report.clock import Clock
from pipetransformer.report.codecs import CodecRecord
from pipetransformer.report.console import (
    abort_line,
    closing_table,
    epoch_line,
    first_step_line,
    recovery_line,
    refusal_line,
    transformation_line,
)
from pipetransformer.report.counters import Counters
from pipetransformer.report.ending import Ending
from pipetransformer.report.epochs import EpochRecord, PlanShape, SegmentRecord
from pipetransformer.report.history import History, write_summary
from pipetransformer.report.page import page, write_page
from pipetransformer.report.phases import Phases, parts_of
from pipetransformer.report.ranges import profiled
from pipetransformer.report.saved import Saved, saved_by_freezing
from pipetransformer.report.throttle import Throttle
from pipetransformer.report.trace import MOST, Timeline
from pipetransformer.report.transformations import (
    AbortRecord,
    RecoveryRecord,
    RefusalRecord,
    TransformationRecord,
)

__all__ = [
    "AbortRecord",
    "Callback",
    "Clock",
    "CodecRecord",
    "Counters",
    "CsvWriter",
    "Ending",
    "EpochRecord",
    "History",
    "MOST",
    "Listeners",
    "Phases",
    "PlanShape",
    "ProgressBar",
    "RecoveryRecord",
    "RefusalRecord",
    "Saved",
    "SegmentRecord",
    "StepRecord",
    "TensorBoardWriter",
    "Throttle",
    "Timeline",
    "TransformationRecord",
    "WandbWriter",
    "abort_line",
    "closing_table",
    "epoch_line",
    "first_step_line",
    "page",
    "parts_of",
    "profiled",
    "recovery_line",
    "refusal_line",
    "saved_by_freezing",
    "transformation_line",
    "write_page",
    "write_summary",
]
