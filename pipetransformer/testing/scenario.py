"""A whole run on simulated devices: plans one after the other, pauses, slow devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer import _C
from pipetransformer.core.wire import check_int
from pipetransformer.planner import Cluster, Plan, Profile
from pipetransformer.simulator import plan_costs

EVENTS = ("start", "boundary", "transformation", "failure")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps under one plan.

    Args:
        plan: what is run.
        steps: how many steps the run gets further, at least 1.
        event: what leads to it: ``"start"``, ``"boundary"`` (more layers frozen),
            ``"transformation"`` (other cuts or another shape) or ``"failure"`` (a
            device was lost).
        pause_ns: time before its first step, ns.
        redone_steps: steps of before that were lost and run again under this plan.
        cluster: the machines from here on; None: as before.

    Raises:
        ValueError: a field is malformed.
    """

    plan: Plan
    steps: int
    event: str = "start"
    pause_ns: int = 0
    redone_steps: int = 0
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_int(self.steps, "segment steps", low=1)
        check_int(self.pause_ns, "segment pause_ns")
        check_int(self.redone_steps, "segment redone_steps")
        if self.event not in EVENTS:
            raise ValueError(
                f"segment event: expected one of {EVENTS}, got {self.event!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A device that is slow for a while.

    Args:
        device: number among the cluster's devices, node by node. Which replica and
            stage it slows is up to the plan of the time.
        slowdown: its compute takes this many times as long, 0.001 to 100.
        first_step: from this step of the run on, those that were run again counted.
        end_step: up to this one, itself not counted.

    Raises:
        ValueError: a field is malformed.
    """

    device: int
    slowdown: float
    first_step: int
    end_step: int

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("device", "first_step"):
            check_int(getattr(self, name), f"straggler {name}")
        check_int(self.end_step, "straggler end_step", low=self.first_step + 1)
        if isinstance(self.slowdown, bool) or not (
            isinstance(self.slowdown, (int, float)) and 0.001 <= self.slowdown <= 100
        ):
            raise ValueError(
                f"straggler slowdown: expected 0.001 to 100, got {self.slowdown!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps of a segment that take equally long.

    Args:
        steps: how many.
        step_ns: time of each, ns.
    """

    steps: int
    step_ns: int


@dataclass(frozen=True, kw_only=True)
class SegmentTimes:
    """Simulated times of a segment.

    Args:
        plan: its plan in one line.
        event: what led to it.
        first_step: number of its first step in the run, repeated ones counted.
        pause_ns: time before that step, ns.
        redone_steps: how many of its steps repeat lost ones.
        stretches: its steps, in order.
    """

    plan: str
    event: str
    first_step: int
    pause_ns: int
    redone_steps: int
    stretches: tuple[Stretch, ...]

    @property
    def total_ns(self) -> int:
        """Pause and steps, ns."""
        return self.pause_ns + sum(s.steps * s.step_ns for s in self.stretches)


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Simulated times of a run.

    Args:
        segments: one for each plan, in order.
    """

    segments: tuple[SegmentTimes, ...]

    @property
    def total_ns(self) -> int:
        """Time of the whole run, ns."""
        return sum(segment.total_ns for segment in self.segments)

    @property
    def step_times_ns(self) -> tuple[int, ...]:
        """Time of each step that was run, pauses left out, ns."""
        return tuple(
            stretch.step_ns
            for segment in self.segments
            for stretch in segment.stretches
            for _ in range(stretch.steps)
        )

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready values."""
        return {
            "simulated": True,
            "total_ns": self.total_ns,
            "segments": [
                {
                    "plan": segment.plan,
                    "event": segment.event,
                    "first_step": segment.first_step,
                    "pause_ns": segment.pause_ns,
                    "redone_steps": segment.redone_steps,
                    "stretches": [
                        {"steps": s.steps, "step_ns": s.step_ns}
                        for s in segment.stretches
                    ],
                    "total_ns": segment.total_ns,
                }
                for segment in self.segments
            ],
        }


def simulate_run(
    segments: Sequence[Segment],
    profile: Profile,
    cluster: Cluster,
    *,
    stragglers: Sequence[Straggler] = (),
) -> RunTimes:
    """Play a run: each plan's steps, what comes between them, slow devices.

    Replicas that are equal are played once; one with a slow device is played of its
    own, and the all-reduces wait for it. So neither steps nor devices add to the cost.

    Args:
        segments: at least one.
        profile: measured costs of the layers.
        cluster: the machines at the start.
        stragglers: devices that are slow at times.

    Returns:
        Times by segment; their sum is the run's.

    Raises:
        ValueError: no segment, or a plan that does not fit; the text names it.
    """
    if not segments:
        raise ValueError("segments: expected at least one, got none")
    times = []
    first_step = 0
    for segment in segments:
        cluster = segment.cluster or cluster
        count = segment.redone_steps + segment.steps
        player = _Player(segment.plan, profile, cluster)
        times.append(
            SegmentTimes(
                plan=f"{segment.plan.describe()} {segment.plan.schedule}",
                event=segment.event,
                first_step=first_step,
                pause_ns=segment.pause_ns,
                redone_steps=segment.redone_steps,
                stretches=tuple(player.play(first_step, count, stragglers)),
            )
        )
        first_step += count
    return RunTimes(segments=tuple(times))


class _Player:
    """Plays steps of one plan, each set of slow devices once."""

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._costs = plan_costs.of_plan(plan, profile, cluster)
        self._known: dict[tuple[tuple[int, ...], ...], int] = {}

    def play(
        self, first_step: int, count: int, stragglers: Sequence[Straggler]
    ) -> list[Stretch]:
        end_step = first_step + count
        borders = {first_step, end_step}
        for straggler in stragglers:
            borders |= {straggler.first_step, straggler.end_step}
        within = sorted(b for b in borders if first_step <= b <= end_step)
        return [
            Stretch(
                steps=end - begin,
                step_ns=self._step_ns(
                    [s for s in stragglers if s.first_step <= begin < s.end_step]
                ),
            )
            for begin, end in zip(within, within[1:], strict=False)
        ]

    def _step_ns(self, slow: Sequence[Straggler]) -> int:
        replicas = self._distinct_replicas(slow)
        if replicas not in self._known:
            options = _C.simulator.StepOptions()
            result = _C.simulator.step(
                self._costs, options, [list(replica) for replica in replicas]
            )
            self._known[replicas] = result.step_ns
        return self._known[replicas]

    def _distinct_replicas(
        self, slow: Sequence[Straggler]
    ) -> tuple[tuple[int, ...], ...]:
        """Speeds by stage, in thousandths; () for replicas at full speed."""
        stages, num_replicas, _ = self._plan.shape
        speeds: dict[int, list[int]] = {}
        for straggler in slow:
            place = self._place_of(straggler.device)
            if place is not None:
                speed = speeds.setdefault(place[0], [1000] * stages)
                permille = round(straggler.slowdown * 1000)
                speed[place[1]] = max(1, speed[place[1]] * permille // 1000)
        distinct = {tuple(speed) for speed in speeds.values()}
        if len(speeds) < num_replicas:
            distinct.add(())
        return tuple(sorted(distinct))

    def _place_of(self, device: int) -> tuple[int, int] | None:
        """Replica and stage that run on a device; None: it is idle."""
        stages, num_replicas, _ = self._plan.shape
        node, slot = divmod(device, self._cluster.devices_per_node)
        # Replicas are dealt to the nodes in turn and numbered node by node.
        share, extra = divmod(num_replicas, self._cluster.num_nodes)
        on_node = share + (node < extra)
        if slot // stages >= on_node:
            return None
        replica = node * share + min(node, extra) + slot // stages
        return replica, slot % stages
