"""Elastic pipelined fine-tuning of ``nn.Sequential`` models."""

from pipetransformer._extension import load as _load

_load()

# The extension must be there before the rooms that bind it.
from pipetransformer import autofreeze as freeze  # noqa: E402
from pipetransformer import report  # noqa: E402
from pipetransformer.autodp import AutoDPConfig, PeerFailure  # noqa: E402
from pipetransformer.config import (  # noqa: E402
    CacheConfig,
    CheckpointConfig,
    Config,
    PipeConfig,
    PlanConfig,
)
from pipetransformer.data import Batch  # noqa: E402
from pipetransformer.engine import PipeTransformer  # noqa: E402
from pipetransformer.pipe import Pipe  # noqa: E402
from pipetransformer.planner import InfeasiblePlan, Plan  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "AutoDPConfig",
    "Batch",
    "CacheConfig",
    "CheckpointConfig",
    "Config",
    "InfeasiblePlan",
    "PeerFailure",
    "Pipe",
    "PipeConfig",
    "PipeTransformer",
    "Plan",
    "PlanConfig",
    "freeze",
    "report",
]
