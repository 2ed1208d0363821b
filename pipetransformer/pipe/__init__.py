"""Room ``pipe``: a pipeline of stages in one process, shaped like a module."""

from pipetransformer.pipe.balance import balance_by_size, balance_by_time
from pipetransformer.pipe.batchnorm import DeferredBatchNorm, accumulator_names
from pipetransformer.pipe.draws import draw_scope, keyed_draws_work
from pipetransformer.pipe.gpipe import GPipe
from pipetransformer.pipe.no_chunk import NoChunk
from pipetransformer.pipe.partition import partition_model
from pipetransformer.pipe.phases import is_checkpointing, is_recomputing
from pipetransformer.pipe.pipe import Pipe
from pipetransformer.pipe.plain_names import from_plain_state_dict, to_plain_state_dict
from pipetransformer.pipe.result import PipeResult
from pipetransformer.pipe.stage import PipeSequential
from pipetransformer.pipe.with_device import WithDevice
from pipetransformer.pipe.workers import Workers

__all__ = [
    "DeferredBatchNorm",
    "GPipe",
    "NoChunk",
    "Pipe",
    "PipeResult",
    "PipeSequential",
    "WithDevice",
    "Workers",
    "accumulator_names",
    "balance_by_size",
    "balance_by_time",
    "draw_scope",
    "from_plain_state_dict",
    "is_checkpointing",
    "is_recomputing",
    "keyed_draws_work",
    "partition_model",
    "to_plain_state_dict",
]
