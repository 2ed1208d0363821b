"""What a training pass did: one record per pass, one segment per plan in it."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipetransformer.core.wire import Fields, check_int


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """The numbers of a plan that people compare.

    Attributes:
        num_frozen_layers: Freeze units frozen from the front.
        boundary: Index of the first active layer.
        num_stages: K.
        num_replicas: R.
        num_microbatches: M.
    """

    num_frozen_layers: int
    boundary: int
    num_stages: int
    num_replicas: int
    num_microbatches: int

    @classmethod
    def from_json(cls, value: object, what: str) -> PlanShape:
        """Read a shape from an object that has its fields, such as a pass's record.

        Raises:
            ValueError: a missing or wrong field (named after `what`).
        """
        read = Fields(value, what).read
        names = (entry.name for entry in dataclasses.fields(cls))
        return cls(**{name: read(name, check_int) for name in names})

    def __str__(self) -> str:
        """Return for example ``frozen 4, K=2, R=2, M=4``."""
        return (
            f"frozen {self.num_frozen_layers}, K={self.num_stages}, "
            f"R={self.num_replicas}, M={self.num_microbatches}"
        )


@dataclasses.dataclass(frozen=True)
class SegmentRecord:
    """The part of a training pass that ran under one plan, over all replicas.

    Attributes:
        shape: That plan.
        samples: Samples seen.
        optimizer_steps: Optimizer steps taken.
        seconds: Wall time, transformations and evaluations excluded.
        train_loss: Mean over samples, or over what the engine's ``loss_weight`` counts;
            NaN without any.
        cache_hits: Samples whose frozen activations came from the cache.
        cache_misses: Samples of a frozen prefix that had to be computed.
        cache: As in `EpochRecord`.
        phase_seconds: As in `EpochRecord`.
        worker_seconds: As in `EpochRecord`.
        predicted_step_ns: Predicted time of a whole step under the plan; 0 if unknown.
        pace: Factor in it: what passes before took over their simulated time.
        weight: How many the loss is the mean of.
        began_seconds: From the run's opening to its begin, on the lead.
        cuts: Of the plan: layer indices from the boundary to the number of layers.
        schedule: Of the plan.
        prefix: Where the plan has the frozen layers.
        bytes_per_stage: What the plan takes of each stage's slot.
        slot_bytes: What a slot may hold; 0 if unknown.
        learning_rate: Of the first group, at its end; None without an optimizer.
        first_step_seconds: What its first step took more than the others on the rank
            that tells, if it is the first of a plan; in `seconds`, too.
    """

    shape: PlanShape
    samples: int
    optimizer_steps: int
    seconds: float
    train_loss: float
    cache_hits: int
    cache_misses: int
    phase_seconds: dict[str, float]
    worker_seconds: list[float]
    predicted_step_ns: int
    weight: float = 0.0
    cache: dict[str, int] = dataclasses.field(default_factory=dict)
    pace: float = 1.0
    began_seconds: float = 0.0
    cuts: list[int] = dataclasses.field(default_factory=list)
    schedule: str = "gpipe"
    prefix: str = "none"
    bytes_per_stage: list[int] = dataclasses.field(default_factory=list)
    slot_bytes: int = 0
    learning_rate: float | None = None
    first_step_seconds: float = 0.0

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> SegmentRecord:
        """Read what ``dataclasses.asdict`` gave, also after JSON."""
        return cls(**{**fields, "shape": PlanShape(**fields["shape"])})

    def to_json(self) -> dict[str, Any]:
        """Return the segment in the summary's format."""
        return {
            **dataclasses.asdict(self.shape),
            "samples": self.samples,
            "optimizer_steps": self.optimizer_steps,
            "began_seconds": self.began_seconds,
            "seconds": self.seconds,
            "train_loss": self.train_loss,
            "cuts": self.cuts,
            "schedule": self.schedule,
            "prefix": self.prefix,
            "bytes_per_stage": self.bytes_per_stage,
            "slot_bytes": self.slot_bytes,
            "learning_rate": self.learning_rate,
        }


@dataclasses.dataclass
class EpochRecord:
    """One training pass, over all replicas.

    Attributes:
        epoch: 0-based.
        shape: The plan it ran under; the last one where it ran under several.
        samples: Samples seen.
        unique_samples: Different samples seen, those of steps with bare inputs left
            out, which name none.
        optimizer_steps: Optimizer steps taken.
        seconds: Wall time of the pass without transformations, recoveries, evaluations;
            how long a step waited for a lost rank is in it.
        train_loss: Mean over samples.
        cache_hits: Samples whose frozen activations came from the cache.
        cache_misses: Samples of a frozen prefix that had to be computed.
        cache: Misses by kind, ``absent`` (never stored), ``stale`` (of another prefix),
            ``changed`` (of another input), ``corrupt`` and ``late`` (not read from disk
            in time); rows ``stored`` and, for lack of room, not (``full``); hits
            computed again and compared (``audited``), hits from disk
            (``disk_hits``) and from copies on devices (``device_hits``, if any);
            ``bytes`` and ``disk_bytes`` of all records on all nodes;
            rows whose frozen layers ran because that is cheaper (``recomputed``, if
            any). Of a disk, where it was used: ``disk_read_bytes`` and
            ``disk_written_bytes`` in whole blocks, ``disk_read_ns`` and
            ``disk_write_ns`` in which some were under way, summed over replicas, and
            ``disk_wait_ns`` that steps waited for reads. Empty: no cache yet.
        metrics: What the last evaluation after the pass returned; of several sets also
            that of each, as ``"test/loss"``.
        phase_seconds: The lead's wall time of the pass by phase, see `Clock`; what the
            pass's end itself takes is in the run's.
        worker_seconds: Processor seconds of each of the lead's stages in the pass.
        elapsed_seconds: From the run's opening to the end of the pass, on the lead.
        predicted_step_ns: As in `SegmentRecord`, over the segments.
        pace: As in `SegmentRecord`; of the last one.
        segments: One per plan that the pass ran under.
    """

    epoch: int
    shape: PlanShape
    samples: int
    unique_samples: int
    optimizer_steps: int
    seconds: float
    train_loss: float
    cache_hits: int
    cache_misses: int
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    phase_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    worker_seconds: list[float] = dataclasses.field(default_factory=list)
    elapsed_seconds: float = 0.0
    predicted_step_ns: int = 0
    segments: list[SegmentRecord] = dataclasses.field(default_factory=list)
    cache: dict[str, int] = dataclasses.field(default_factory=dict)
    pace: float = 1.0

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> EpochRecord:
        """Read what ``dataclasses.asdict`` gave, also after JSON."""
        parts = [SegmentRecord.from_fields(part) for part in fields["segments"]]
        shape = PlanShape(**fields["shape"])
        return cls(**{**fields, "shape": shape, "segments": parts})

    @property
    def measured_step_ns(self) -> int:
        """Mean wall time of an optimizer step of the pass, ns; 0 without steps."""
        if not self.optimizer_steps:
            return 0
        return round(1e9 * self.seconds / self.optimizer_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the record in the summary's format."""
        shape = dataclasses.asdict(self.shape)
        return {
            "epoch": self.epoch,
            **shape,
            "samples": self.samples,
            "unique_samples": self.unique_samples,
            "optimizer_steps": self.optimizer_steps,
            "seconds": self.seconds,
            "train_loss": self.train_loss,
            "accuracy": self.metrics.get("accuracy"),
            "metrics": self.metrics,
            "cache_hits": self.cache_hits,
            "cache_misses": self.cache_misses,
            "cache": self.cache,
            "phase_seconds": self.phase_seconds,
            "worker_seconds": self.worker_seconds,
            "elapsed_seconds": self.elapsed_seconds,
            "predicted_step_ns": self.predicted_step_ns,
            "pace": self.pace,
            "measured_step_ns": self.measured_step_ns,
            "segments": [segment.to_json() for segment in self.segments],
        }
