"""One training step of a plan on simulated devices."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer import _C
from pipetransformer.core import text_files
from pipetransformer.core.wire import check_int
from pipetransformer.planner import Cluster, Plan, Profile
from pipetransformer.simulator import _grid, _trace, plan_costs
from pipetransformer.simulator.event import Event

_PREFIX_MODES = {
    "barrier": _C.simulator.PrefixMode.BARRIER,
    "serial": _C.simulator.PrefixMode.SERIAL,
    "filled": _C.simulator.PrefixMode.FILLED,
}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a number of equal steps would take; simulated, not measured.

    Args:
        title: the plan in one line.
        num_steps: how many steps were asked for.
        step_ns: time of one step, ns; of batches that share an optimizer step the
            mean.
        last_step_ns: of these the last one's, which reduces gradients, ns. What follows
            is of that one.
        bubble_fraction: share of the stages' time, from the first forward to the last
            backward, in which they stand still.
        stage_busy_ns: time in which each stage runs its operations, per step, ns.
        peak_bytes_per_stage: largest memory of each stage's device, bytes.
        exposed_all_reduce_ns: time of a step after its last operation in which
            gradients are still reduced, ns.
        timeline: what runs when, from the start of a step, by begin.
    """

    title: str
    num_steps: int
    step_ns: int
    last_step_ns: int
    bubble_fraction: float
    stage_busy_ns: tuple[int, ...]
    peak_bytes_per_stage: tuple[int, ...]
    exposed_all_reduce_ns: int
    timeline: tuple[Event, ...]

    @property
    def total_ns(self) -> int:
        """Time of all steps, ns."""
        return self.num_steps * self.step_ns

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready values, without the timeline."""
        return {
            "simulated": True,
            "plan": self.title,
            "num_steps": self.num_steps,
            "step_ns": self.step_ns,
            "last_step_ns": self.last_step_ns,
            "total_ns": self.total_ns,
            "bubble_fraction": self.bubble_fraction,
            "stage_busy_ns": list(self.stage_busy_ns),
            "peak_bytes_per_stage": list(self.peak_bytes_per_stage),
            "exposed_all_reduce_ns": self.exposed_all_reduce_ns,
        }

    def grid(self, width: int = 100) -> str:
        """Return the last step as text: a line per stage, time from left to right.

        Args:
            width: columns of time, at least 10.

        Returns:
            Lines such as ``stage 0  F0F1..B1B0``: operations with their micro-batch,
            ``.`` where the device stands still.
        """
        return _grid.draw(self.timeline, self.title, self.last_step_ns, width)

    def write_trace(self, path: str | pathlib.Path) -> None:
        """Write the last step for Perfetto or Chrome's tracing page.

        Args:
            path: JSON file; readable by its owner only, replaced as a whole. A device
                or a FIFO is written to.

        Raises:
            OSError: the file cannot be written; names it.
            ValueError: an empty path.
        """
        text_files.write(path, self.trace() + "\n")

    def trace(self) -> str:
        """Return what :meth:`write_trace` writes."""
        return _trace.text(self.timeline, self.title)


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    steps: int = 1,
    prefix: str = "barrier",
) -> Simulation:
    """Play a plan's training step on simulated devices.

    All replicas are equal, so one is played and its all-reduces are those of all. Every
    step waits for the optimizer of the one before, so steps are equal too. Of batches
    that share an optimizer step the last one is played, and one of the others.

    Args:
        plan: what is run.
        profile: measured costs of the layers.
        cluster: the machines.
        steps: how many, at least 1.
        prefix: when and where the frozen layers run: ``"barrier"`` (as the plan says,
            before the first forward where it does not say "filled": what the runtime
            does), ``"serial"`` (before the first forward, all on the first device: the
            paper's way) or ``"filled"`` (those of the next step in the gaps of this
            one, whatever the plan says).

    Returns:
        Times of a step and of all, memory and what ran when.

    Raises:
        ValueError: the plan fits profile or cluster not; the text names the field.
    """
    check_int(steps, "steps", low=1)
    costs = plan_costs.of_plan(plan, profile, cluster)
    options = _C.simulator.StepOptions()
    options.keep_timeline = True
    if prefix not in _PREFIX_MODES:
        raise ValueError(
            f"prefix: expected one of {tuple(_PREFIX_MODES)}, got {prefix!r}"
        )
    options.prefix = _PREFIX_MODES[prefix]
    result = _C.simulator.step(costs, options)
    (pipeline,) = result.pipelines
    return Simulation(
        title=f"{plan.describe()} {plan.schedule}",
        num_steps=steps,
        step_ns=result.step_ns,
        last_step_ns=result.last_step_ns,
        bubble_fraction=round(pipeline.bubble_fraction, 6),
        stage_busy_ns=tuple(pipeline.stage_busy_ns),
        peak_bytes_per_stage=tuple(pipeline.peak_bytes),
        exposed_all_reduce_ns=result.exposed_all_reduce_ns,
        timeline=_events(result.timeline),
    )


def _events(natives: Sequence[_C.simulator.Event]) -> tuple[Event, ...]:
    return tuple(
        Event(
            kind=native.kind,
            resource=native.resource.name.lower().replace("_", " "),
            stage=native.stage,
            microbatch=None if native.microbatch < 0 else native.microbatch,
            direction=native.direction,
            begin_ns=native.begin_ns,
            end_ns=native.end_ns,
        )
        for native in natives
    )
