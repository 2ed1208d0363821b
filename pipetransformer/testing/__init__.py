"""What tests, benchmarks and tools use, and a run does not.

`solvers`: the planner's exact solvers alone. `scenario`: a whole run on simulated
devices. `ablation`: a pipeline without some of its parts. Nothing here is part of the
interface; it changes without notice.
"""
