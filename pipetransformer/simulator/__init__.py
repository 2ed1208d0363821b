"""Room ``simulator``: plays steps and runs on devices that need not be there."""

from pipetransformer.simulator.event import Event
from pipetransformer.simulator.scenario import (
    RunTimes,
    Segment,
    SegmentTimes,
    Straggler,
    Stretch,
    simulate_run,
)
from pipetransformer.simulator.simulation import Simulation, simulate

__all__ = [
    "Event",
    "RunTimes",
    "Segment",
    "SegmentTimes",
    "Simulation",
    "Straggler",
    "Stretch",
    "simulate",
    "simulate_run",
]
