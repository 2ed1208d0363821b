"""Room ``pipe``: a pipeline of stages in one process, shaped like a module."""

from pipetransformer.pipe.batchnorm import DeferredBatchNorm
from pipetransformer.pipe.draws import draw_scope
from pipetransformer.pipe.phases import is_checkpointing, is_recomputing
from pipetransformer.pipe.pipe import Pipe
from pipetransformer.pipe.plain_names import from_plain_state_dict, to_plain_state_dict
from pipetransformer.pipe.result import PipeResult
from pipetransformer.pipe.stage import PipeSequential
from pipetransformer.pipe.with_device import WithDevice
from pipetransformer.pipe.workers import Workers

__all__ = [
    "DeferredBatchNorm",
    "Pipe",
    "PipeResult",
    "PipeSequential",
    "WithDevice",
    "Workers",
    "draw_scope",
    "from_plain_state_dict",
    "is_checkpointing",
    "is_recomputing",
    "to_plain_state_dict",
]
