"""What the simulator says of a step that is measured too.

A measured profile goes through the planner, with every choice given, into the
simulator: the same way as in a run.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer import planner
from pipetransformer.planner import Cluster, Plan, Profile
from pipetransformer.simulator import simulate

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
_TIMES = ("forward_ns", "input_grad_ns", "weight_grad_ns", "forward_only_ns")


@dataclass(frozen=True)
class Case:
    """One way to run a step through a pipeline.

    Attributes:
        cuts: K + 1 layer indices.
        num_microbatches: M.
        schedule: One of ``SCHEDULES``.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
    """

    cuts: tuple[int, ...]
    num_microbatches: int
    schedule: str
    checkpoint: str = "never"

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.cuts) - 1

    def __str__(self) -> str:
        """Return K, M, schedule and recomputation, for people."""
        again = "" if self.checkpoint == "never" else f" {self.checkpoint}"
        return f"K={self.num_stages} M={self.num_microbatches} {self.schedule}{again}"


def slots(num_slots: int) -> Cluster:
    """Return CPU slots with more memory than anything here needs."""
    return Cluster(devices_per_node=num_slots, device_memory_bytes=2**50)


def plan_of(profile: Profile, case: Case, rows: int) -> Plan:
    """Return the plan in which only one way is allowed.

    Args:
        profile: Of all layers.
        case: That way.
        rows: Of a step.
    """
    return planner.search(
        profile,
        slots(case.num_stages),
        global_batch=rows,
        cuts=case.cuts,
        num_microbatches=case.num_microbatches,
        checkpoint=case.checkpoint,
        schedules=(case.schedule,),
    )


def simulated_s(profile: Profile, case: Case, rows: int) -> float:
    """Return the simulated seconds of a step; arguments as for `plan_of`."""
    plan = plan_of(profile, case, rows)
    return simulate(plan, profile, slots(case.num_stages)).step_ns / 1e9


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the median of each time over profiles of the same model.

    Raises:
        ValueError: no profile, or of other layers or sizes.
    """
    shapes = {(p.microbatch_samples, len(p.layers)) for p in profiles}
    if len(shapes) != 1:
        raise ValueError(f"profiles: expected equal sizes and layers, got {shapes}")
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        times = {
            name: tuple(
                round(statistics.median(values))
                for values in zip(*(getattr(one, name) for one in same), strict=True)
            )
            for name in _TIMES
        }
        layers.append(dataclasses.replace(same[0], **times))
    return dataclasses.replace(profiles[0], layers=tuple(layers))
