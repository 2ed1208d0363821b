"""When the front of the model stops training, and what that does to its layers."""

from pipetransformer.autofreeze.accumulator import GradientAccumulator
from pipetransformer.autofreeze.alpha_cap import AlphaCap
from pipetransformer.autofreeze.auto_freeze import AutoFreeze
from pipetransformer.autofreeze.freezer import LayerFreezer
from pipetransformer.autofreeze.guarded import Guarded
from pipetransformer.autofreeze.loss_sum import LossSum
from pipetransformer.autofreeze.plasticity import Plasticity
from pipetransformer.autofreeze.policies import Manual, Never, Schedule
from pipetransformer.autofreeze.policy import (
    Decision,
    FreezeStatistics,
    Policy,
    Progress,
    ProgressEntry,
    replay,
    told,
)
from pipetransformer.autofreeze.similarity import ActivationChange
from pipetransformer.autofreeze.units import (
    boundary_of,
    movable_boundary,
    noise_in_front,
    resolve_units,
    starting_units,
)

__all__ = [
    "ActivationChange",
    "AlphaCap",
    "AutoFreeze",
    "Decision",
    "FreezeStatistics",
    "GradientAccumulator",
    "Guarded",
    "LayerFreezer",
    "LossSum",
    "Manual",
    "Never",
    "Plasticity",
    "Policy",
    "Progress",
    "ProgressEntry",
    "Schedule",
    "boundary_of",
    "movable_boundary",
    "noise_in_front",
    "replay",
    "resolve_units",
    "starting_units",
    "told",
]
