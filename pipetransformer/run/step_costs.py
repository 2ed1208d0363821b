"""What a step takes in this run, over what was expected: learned pass by pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pipetransformer.core.wire import check_float, read_object
from pipetransformer.planner import Cluster, Plan, Profile, step_costs
from pipetransformer.report import SegmentRecord

_NANOSECONDS = 1e9
_WIDEST = 64.0  # a factor is from its inverse to it

# Of the filter, as variances of relative errors.
_UNKNOWN = 1.0  # before the first pass
_NOISE = 0.01  # of a pass
_DRIFT = 0.0025  # from one pass to the next
_CHANGE = 0.09  # of a change of plan


@dataclasses.dataclass(frozen=True)
class StepFactors:
    """What costs of a step are multiplied by, equal on every active rank.

    Attributes:
        pace: Wall time of a whole step over its simulated time, with the other
            factors in it: what the model does not know.
        link: Time of all-reduces between processes of a host, and between nodes.
        host: What a process does besides computing.
    """

    pace: float = 1.0
    link: float = 1.0
    host: float = 1.0

    def applied(self, cluster: Cluster) -> Cluster:
        """Return a cluster with the links and the process of this run."""
        rate, between = cluster.replica_link_bytes_per_s, cluster.network_bytes_per_s
        return dataclasses.replace(
            cluster,
            replica_link_bytes_per_s=rate and max(1, round(rate / self.link)),
            replica_link_latency_ns=round(cluster.replica_link_latency_ns * self.link),
            network_bytes_per_s=between and max(1, round(between / self.link)),
            network_latency_ns=round(cluster.network_latency_ns * self.link),
            step_ns=round(cluster.step_ns * self.host),
            row_ns=round(cluster.row_ns * self.host),
        )

    def to_dict(self) -> dict[str, float]:
        """Return the factors as JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: object, what: str) -> StepFactors:
        """Read what `to_dict` gave.

        Raises:
            ValueError: malformed; the text names the field.
        """
        names = tuple(field.name for field in dataclasses.fields(cls))
        read = read_object(value, what, required=names)
        found = {name: check_float(read[name], f"{what} {name}") for name in names}
        for name, factor in found.items():
            if not 1 / _WIDEST <= factor <= _WIDEST:
                raise ValueError(
                    f"{what} {name}: expected 1/{_WIDEST:g} to {_WIDEST:g}, got "
                    f"{factor}"
                )
        return cls(**found)


class _Learned:
    """A factor with how sure it is: a filter for a value that drifts.

    Source: the scalar Kalman filter of a random walk (Kalman, 1960).
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._variance = _UNKNOWN

    def disturb(self, variance: float) -> None:
        self._variance = min(_UNKNOWN, self._variance + variance)

    def observe(self, measured: float, expected: float) -> None:
        if measured <= 0 or expected <= 0:
            return
        found = min(max(measured / expected, 1 / _WIDEST), _WIDEST)
        gain = self._variance / (self._variance + _NOISE)
        self.value += gain * (found - self.value)
        self._variance = (1 - gain) * self._variance + _DRIFT


class StepLearner:
    """Learns the factors from the passes of one rank.

    Attributes:
        factors: What this rank has found.
    """

    def __init__(self) -> None:
        self._pace, self._link, self._host = _Learned(), _Learned(), _Learned()
        self._shape: object = None

    @property
    def factors(self) -> StepFactors:
        """What this rank has found, rounded so that texts are short."""
        return StepFactors(
            pace=round(self._pace.value, 3),
            link=round(self._link.value, 3),
            host=round(self._host.value, 3),
        )

    def follow(self, factors: StepFactors) -> None:
        """Go on from the lead's factors."""
        self._pace.value, self._link.value = factors.pace, factors.link
        self._host.value = factors.host

    def observe(
        self,
        segment: SegmentRecord,
        plan: Plan,
        profile: Profile,
        cluster: Cluster,
        planned: StepFactors,
        batches: float,
    ) -> None:
        """Take in what ran under one plan.

        Args:
            segment: A pass, or the part of it under the plan.
            plan: The plan.
            profile: Of the layers.
            cluster: As measured before the run, without factors.
            planned: Factors that the plan was made with.
            batches: Of the segment, by its optimizer steps.
        """
        if not batches:
            return
        if segment.shape != self._shape:
            for each in (self._pace, self._link, self._host):
                each.disturb(_CHANGE)
            self._shape = segment.shape
        spent = {
            name: seconds * _NANOSECONDS / batches
            for name, seconds in segment.phase_seconds.items()
        }
        whole = segment.seconds * _NANOSECONDS / batches - unplanned(segment, spent)
        # What its first step took more is a part of the pause before it. What comes
        # once is in that step, too: it is taken off already.
        begin = segment.first_step_seconds * _NANOSECONDS / batches
        begin = max(0.0, begin - unplanned(segment, spent))
        whole -= begin
        if plan.num_replicas > 1:
            expected = all_reduce_ns(plan, profile, cluster)
            self._link.observe(spent.get("backward/all_reduce", 0.0), expected)
        computing = ("forward", "forward/prefix", "forward/cache_read", "backward")
        counted = sum(spent.get(name, 0.0) for name in computing) - begin
        counted += spent.get("backward/all_reduce", 0.0)
        if any(layer.optimizer_ns for layer in profile.layers):
            counted += spent.get("optimizer", 0.0)
        prefix = spent.get("forward/prefix", 0.0) if _is_filling(segment) else 0.0
        self._host.observe(whole - counted + prefix, host_ns(plan, cluster))
        # What the plan's time would be with what is known now.
        now, then = self.factors.applied(cluster), planned.applied(cluster)
        simulated = float(plan.simulated_step_ns)
        simulated += host_ns(plan, now) - host_ns(plan, then)
        simulated += all_reduce_ns(plan, profile, now)
        simulated -= all_reduce_ns(plan, profile, then)
        self._pace.observe(whole, simulated)


def host_ns(plan: Plan, cluster: Cluster) -> float:
    """Return what the process of a replica is expected to take besides computing."""
    rows = -(-plan.global_batch // plan.num_replicas)
    alone = cluster.step_ns + rows * cluster.row_ns
    per_node = -(-plan.num_replicas // min(cluster.num_nodes, plan.num_replicas))
    shared = 1000 * per_node / cluster.cores_permille if cluster.cores_permille else 0
    return alone * max(1.0, shared)


def all_reduce_ns(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Return what of an all-reduce no backward hides: the first stage's, the last.

    Of batches that share an optimizer step the last one reduces: this is their mean.
    """
    if plan.num_replicas == 1:
        return 0.0
    stages = step_costs(plan, profile, cluster).stages
    last = next((s.all_reduce_ns for s in stages if s.all_reduce_ns), 0)
    if plan.schedule != "gpipe":
        last = max(stage.all_reduce_ns for stage in stages)
    return last / plan.accumulation_steps


def unplanned(segment: SegmentRecord, spent: Mapping[str, float]) -> float:
    """Return what of a step comes once and is no part of plans: filling the cache."""
    once = spent.get("forward/cache_write", 0.0) + spent.get("forward/audit", 0.0)
    return once + (spent.get("forward/prefix", 0.0) if _is_filling(segment) else 0.0)


def _is_filling(segment: SegmentRecord) -> bool:
    return segment.cache_hits + segment.cache_misses > 0
