"""Private names of the pipe room that its tests need."""

from pipetransformer import _C

DispatchChoice = _C.pipe.DispatchChoice
parse_schedule = _C.pipe.parse_schedule
schedule_text = _C.pipe.schedule_text

__all__ = ["DispatchChoice", "parse_schedule", "schedule_text"]
