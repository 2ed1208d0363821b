"""What tests, benchmarks and tools use, and a run does not.

`solvers`: the planner's exact solvers alone. `scenario`: a whole run on simulated
devices. Nothing here is part of the interface; it changes without notice.
"""
