"""Step costs, timelines and a second implementation for the simulator's tests."""

from pipetransformer import _C

KINDS = {
    "gpipe": _C.planner.ScheduleKind.GPIPE,
    "1f1b": _C.planner.ScheduleKind.ONE_F_ONE_B,
    "zb-h1": _C.planner.ScheduleKind.ZB_H1,
}
PLACEMENTS = {
    "none": _C.planner.PrefixPlacement.NONE,
    "replicated": _C.planner.PrefixPlacement.REPLICATED,
    "pipelined": _C.planner.PrefixPlacement.PIPELINED,
    "filled": _C.planner.PrefixPlacement.FILLED,
}
MODES = {
    "barrier": _C.simulator.PrefixMode.BARRIER,
    "serial": _C.simulator.PrefixMode.SERIAL,
    "filled": _C.simulator.PrefixMode.FILLED,
}


def stage(forward=0, input_grad=0, weight_grad=0, **fields):
    costs = _C.planner.StageCosts()
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
    costs = _C.planner.StepCosts()
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


def simulate(costs, *, replicas=((),), lists=None, prefix_mode="barrier", **fields):
    """Result of a step; replicas as speeds by stage in thousandths."""
    options = _C.simulator.StepOptions()
    options.prefix = MODES[prefix_mode]
    for name, value in fields.items():
        assert hasattr(options, name)
        setattr(options, name, value)
    return _C.simulator.step(costs, options, [list(r) for r in replicas], lists)


def step_ns(costs, **fields):
    return simulate(costs, **fields).step_ns


def random_stages(rng, *, copies=False, max_stages=8):
    """(stages, first stage with a backward); lengths over three orders of size."""
    num_stages = rng.randint(1, max_stages)
    first = rng.choice([0, 0, rng.randint(0, num_stages - 1)])
    stages = []
    for k in range(num_stages):
        largest = rng.choice([10, 100, 1000])
        forward, input_grad, weight_grad = (rng.randint(0, largest) for _ in range(3))
        trains = k >= first
        stages.append(
            stage(
                forward,
                input_grad * trains,
                weight_grad * trains,
                has_backward=trains,
                forward_copy_ns=rng.randint(0, 300) * (copies and k + 1 < num_stages),
                backward_copy_ns=rng.randint(0, 300) * (copies and k > first),
            )
        )
    return stages, first


def columns(stages):
    """Times by stage: forward, backward, both."""
    forward = [s.forward_ns for s in stages]
    backward = [s.input_grad_ns + s.weight_grad_ns for s in stages]
    return forward, backward, [f + b for f, b in zip(forward, backward, strict=True)]
