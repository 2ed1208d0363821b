"""What this room uses of the C++ extension."""

from pipetransformer import _C

DrawScope = _C.DrawScope
DrawSettings = _C.DrawSettings
PipeEngine = _C.PipeEngine
WorkerPool = _C.WorkerPool
draw_seed = _C.draw_seed
gather_one = _C.gather_one
gpipe_order_text = _C.gpipe_order_text
is_checkpointing = _C.is_checkpointing
is_recomputing = _C.is_recomputing
keyed_draws_work = _C.keyed_draws_work
set_draw_layer = _C.set_draw_layer
shutdown_all_pools = _C.shutdown_all_pools
split_rows = _C.split_rows

__all__ = [
    "DrawScope",
    "DrawSettings",
    "PipeEngine",
    "WorkerPool",
    "draw_seed",
    "gather_one",
    "gpipe_order_text",
    "is_checkpointing",
    "is_recomputing",
    "keyed_draws_work",
    "set_draw_layer",
    "shutdown_all_pools",
    "split_rows",
]
