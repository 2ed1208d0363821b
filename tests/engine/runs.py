"""Runs without processes: real ones, on a control plane that says what it is told."""

import functools

import torch
from torch import nn

from pipetransformer.autodp import ControlPlane, LaunchInfo
from pipetransformer.autofreeze import Never
from pipetransformer.config import Config
from pipetransformer.report.clock import Clock
from pipetransformer.run.arguments import EngineArguments
from pipetransformer.run.context import Run
from pipetransformer.run.layout import Layout
from pipetransformer.run.plan_in_force import PlanInForce
from tests.engine.stand_ins import stand_in


def launched(rank, world_size):
    """Return what the launcher tells one of the ranks of one node."""
    return LaunchInfo(rank, world_size, rank, world_size, 0, 1, "run", True)


def plane_of(rank=0, world_size=2, **attributes):
    """Return a control plane whose ranks all live, unless it is told otherwise."""
    given = {
        "info": launched(rank, world_size),
        "members": tuple(range(world_size)),
        "failure": None,
        "generation": 0,
        "plan_hash": None,
        "store_lost": False,
    }
    return stand_in(ControlPlane, **{**given, **attributes})


def make_run(*, plane=None, config=None, policy=None, model=None, plan=None, **changes):
    """Return a run of a small model, under a plan of rank 0 alone.

    Args:
        plane: Of all ranks; by default that of the second of two.
        config: As for the engine.
        policy: Of freezing; bound here.
        model: A Sequential whose layers are the units, except for the last.
        plan: In force; None: no plan, but ranks that are active.
        **changes: Attributes of the run, and of its plan in force, that differ.
    """
    model = model or nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    policy = policy or Never()
    ends = tuple(range(1, len(model)))
    policy.bind(len(ends))
    arguments = EngineArguments(
        model=model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        lr_scheduler=None,
        loss=nn.functional.cross_entropy,
        policy=policy,
        unit_ends=ends,
        parameters=list(model.parameters()),
        config=config or Config(),
    )
    run = Run(arguments, plane or plane_of(1), Clock())
    names = ("layout", "cache_slots", "plan_epoch")
    given = {name: changes.pop(name) for name in names if name in changes}
    in_force = {"layout": Layout((0,), (0,)), **given}
    run.in_force = PlanInForce(plan=plan, **in_force)
    for name in ("workload", "profile", "cluster"):
        setattr(run.inputs, name, changes.pop(name, None))
    for name, value in changes.items():
        if not hasattr(run, name):
            raise AttributeError(f"a run has no {name}")
        setattr(run, name, value)
    return run
