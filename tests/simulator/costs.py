"""Step costs, timelines and a second implementation for the simulator's tests."""

from pipetransformer.simulator import _binding

KINDS = {
    "gpipe": _binding.PlannerScheduleKind.GPIPE,
    "1f1b": _binding.PlannerScheduleKind.ONE_F_ONE_B,
    "zb-h1": _binding.PlannerScheduleKind.ZB_H1,
}
PLACEMENTS = {
    "none": _binding.PlannerPrefixPlacement.NONE,
    "replicated": _binding.PlannerPrefixPlacement.REPLICATED,
    "pipelined": _binding.PlannerPrefixPlacement.PIPELINED,
}
MODES = {
    "barrier": _binding.SimulatorPrefixMode.BARRIER,
    "serial": _binding.SimulatorPrefixMode.SERIAL,
    "filled": _binding.SimulatorPrefixMode.FILLED,
}


def stage(forward=0, input_grad=0, weight_grad=0, **fields):
    costs = _binding.PlannerStageCosts()
    costs.forward_ns = forward
    costs.input_grad_ns = input_grad
    costs.weight_grad_ns = weight_grad
    for name, value in fields.items():
        assert hasattr(costs, name)
        setattr(costs, name, value)
    return costs


def step(schedule, stages, num_microbatches, *, prefix=None, **fields):
    """Costs of a step; stages as (f, b, w) or StageCosts; prefix as
    (placement, times)."""
    costs = _binding.PlannerStepCosts()
    costs.schedule = KINDS[schedule]
    costs.num_microbatches = num_microbatches
    costs.stages = [stage(*s) if isinstance(s, tuple) else s for s in stages]
    if prefix is not None:
        costs.prefix_placement = PLACEMENTS[prefix[0]]
        costs.prefix_ns = prefix[1]
    for name, value in fields.items():
        assert hasattr(costs, name)
        setattr(costs, name, value)
    return costs


def simulate(costs, *, lists=None, prefix_mode="barrier", **fields):
    """Result for one step or, given a list, for replicas that differ."""
    options = _binding.SimulatorStepOptions()
    options.prefix = MODES[prefix_mode]
    for name, value in fields.items():
        assert hasattr(options, name)
        setattr(options, name, value)
    replicas = costs if isinstance(costs, list) else [costs]
    return _binding.simulator_step(replicas, options, lists)


def step_ns(costs, **fields):
    return simulate(costs, **fields).step_ns
