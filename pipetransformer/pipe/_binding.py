"""What this room uses of the C++ extension."""

from pipetransformer import _C

CallOptions = _C.CallOptions
CallStages = _C.CallStages
DispatchChoice = _C.DispatchChoice
NoChunk = _C.NoChunk
parse_schedule = _C.parse_schedule
schedule_text = _C.schedule_text
DrawScope = _C.DrawScope
DrawSettings = _C.DrawSettings
PipeEngine = _C.PipeEngine
WorkerPool = _C.WorkerPool
gather_one = _C.gather_one
is_checkpointing = _C.is_checkpointing
is_recomputing = _C.is_recomputing
keyed_draws_work = _C.keyed_draws_work
set_draw_layer = _C.set_draw_layer
shutdown_all_pools = _C.shutdown_all_pools
split_rows = _C.split_rows

__all__ = [
    "CallOptions",
    "CallStages",
    "DispatchChoice",
    "NoChunk",
    "parse_schedule",
    "schedule_text",
    "DrawScope",
    "DrawSettings",
    "PipeEngine",
    "WorkerPool",
    "gather_one",
    "is_checkpointing",
    "is_recomputing",
    "keyed_draws_work",
    "set_draw_layer",
    "shutdown_all_pools",
    "split_rows",
]
