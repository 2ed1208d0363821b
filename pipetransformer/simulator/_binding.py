"""The simulator's part of the C++ extension."""

from pipetransformer import _C  # noqa: F401  # loads the extension
from pipetransformer._C import (
    PlannerPrefixPlacement,
    PlannerScheduleKind,
    PlannerStageCosts,
    PlannerStepCosts,
    SimulatorEvent,
    SimulatorPipelineResult,
    SimulatorPrefixMode,
    SimulatorResource,
    SimulatorStepOptions,
    SimulatorStepResult,
    simulator_replay,
    simulator_step,
)

__all__ = [
    "PlannerPrefixPlacement",
    "PlannerScheduleKind",
    "PlannerStageCosts",
    "PlannerStepCosts",
    "SimulatorEvent",
    "SimulatorPipelineResult",
    "SimulatorPrefixMode",
    "SimulatorResource",
    "SimulatorStepOptions",
    "SimulatorStepResult",
    "simulator_replay",
    "simulator_step",
]
