"""The settings of a run, checked where they are made."""

from pipetransformer.config.config import (
    CacheConfig,
    CheckpointConfig,
    Config,
    PipeConfig,
    PlanConfig,
)

__all__ = ["CacheConfig", "CheckpointConfig", "Config", "PipeConfig", "PlanConfig"]
