"""The settings of a run, checked where they are made."""

from pipetransformer.config.config import (
    AmpMode,
    CacheConfig,
    CheckpointConfig,
    Config,
    PipeConfig,
    PlanConfig,
)

__all__ = [
    "AmpMode",
    "CacheConfig",
    "CheckpointConfig",
    "Config",
    "PipeConfig",
    "PlanConfig",
]
