"""What tests and benchmarks take of the C++ extension by themselves."""

from pipetransformer import _C  # noqa: F401  # loads the extension
from pipetransformer._C import (
    SimulatorStepOptions,
    planner_best_cuts,
    planner_cheapest_cuts,
    planner_min_max,
    planner_min_max_by_position,
    planner_staircase,
    simulator_step,
)

__all__ = [
    "planner_best_cuts",
    "planner_cheapest_cuts",
    "planner_min_max",
    "planner_min_max_by_position",
    "planner_staircase",
    "SimulatorStepOptions",
    "simulator_step",
]
