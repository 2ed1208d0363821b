"""The only way of tests into what an engine keeps to itself, and where faults strike.

A module that moves, or a function that gets another name, is changed here alone.
"""

from pipetransformer.autodp import PlanAgreement
from pipetransformer.loop import coordinator, prediction
from pipetransformer.progress.open_pass import OpenPass
from pipetransformer.recovery.resume import Resumption
from pipetransformer.transformation import phases
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.background import Ahead

# Injection point -> (owner, attribute) of the function that is replaced there.
POINTS = {
    "profile": (coordinator, "agree_on_profile"),
    "build": (phases, "_build"),
    "move": (phases, "move"),
    "rewire": (phases, "rewire"),
    "decide": (PlanAgreement, "decide"),
    "await switch": (Changes, "_await_switch"),
    "tell switch": (Ahead, "_tell_switch"),
    "begin pass": (OpenPass, "begin"),
    "close segment": (OpenPass, "close_segment"),
    "recover": (Resumption, "go_on"),
    "bring": (prediction, "_brought"),
    "predict": (prediction.Prediction, "advance"),
}


def function_at(point):
    """Return the function that is called at a point."""
    owner, name = POINTS[point]
    return getattr(owner, name)


def inject(point, function):
    """Have another function called at a point, in this process; return the old one."""
    owner, name = POINTS[point]
    old = getattr(owner, name)
    setattr(owner, name, function)
    return old


def run_of(engine):
    """Return the run of an engine that was opened."""
    return engine._open().run


def policy_of(engine):
    """Return the freeze policy, of a closed engine too."""
    return engine._arguments.policy


def model_of(engine):
    """Return the plain model on the host, whose layers every replica shares."""
    return engine._arguments.model
