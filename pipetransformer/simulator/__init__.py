"""Room ``simulator``: plays steps and runs on devices that need not be there."""

from pipetransformer.simulator.event import Event
from pipetransformer.simulator.simulation import Simulation, simulate

__all__ = [
    "Event",
    "Simulation",
    "simulate",
]
