"""Private names of the pipe room that its tests need."""

from pipetransformer.pipe._binding import DispatchChoice, parse_schedule, schedule_text

__all__ = ["DispatchChoice", "parse_schedule", "schedule_text"]
