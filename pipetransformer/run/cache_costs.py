"""What the cache and the frozen layers take in this run, as one rank measures it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetransformer import autocache
from pipetransformer.autocache import Codec, TierRates, usual_bytes
from pipetransformer.data.structures import tensors_of
from pipetransformer.planner import Profile
from pipetransformer.report import SegmentRecord
from pipetransformer.run.arguments import Workload
from pipetransformer.run.plan_inputs import PlanInputs

_NANOSECONDS = 1e9
_MOST_ROWS = 64  # of a batch with which rates are measured
_WIDEST = 64.0
"""A pass is taken to be at most that many times as slow or fast as measured before."""


def rates_before_run(
    workload: Workload, profile: Profile, inputs: Any
) -> TierRates | None:
    """Measure reads and writes of records as wide as the run's.

    Args:
        workload: Of the run.
        profile: Of the layers.
        inputs: Of some rows, which look-ups hash unless the dataset names them.

    Returns:
        The rates; None where they cannot be measured.
    """
    return autocache.measure_rates(
        max(layer.boundary_bytes_per_sample for layer in profile.layers),
        rows=min(workload.global_batch, _MOST_ROWS),
        num_samples=workload.num_samples,
        hashed=tensors_of(inputs) if workload.hashes else (),
    )


def prefix_ns(profile: Profile, boundary: int, rows: int, *, begin: int = 0) -> float:
    """Return what frozen layers take for a sample, by a profile.

    Args:
        profile: Of the layers.
        boundary: The first layer that is not run.
        rows: Of a micro-batch, at least 1.
        begin: The first layer that is run.
    """
    layers = profile.layers[begin:boundary]
    columns = [layer.forward_only_ns or layer.forward_ns for layer in layers]
    sizes = profile.microbatch_samples
    if not columns:
        return 0.0
    times = [float(sum(column)) for column in zip(*columns, strict=True)]
    if rows <= sizes[0] or rows >= sizes[-1]:
        nearest = 0 if rows <= sizes[0] else -1
        return times[nearest] / sizes[nearest]
    right = next(i for i, size in enumerate(sizes) if size >= rows)
    low, high = sizes[right - 1], sizes[right]
    rise = (times[right] - times[right - 1]) / (high - low)
    return (times[right - 1] + rise * (rows - low)) / rows


class CacheCosts:
    """How many times as long things take as was measured before the run.

    Other programs, and the replicas of a node among each other, slow reads, writes and
    compute in different ways; all three are learned, so that a comparison stays fair.
    Each pass counts as much as all before it.

    Attributes:
        reads: Of reads from the cache.
        writes: Of writes to it.
        prefix: Of the frozen layers.
    """

    def __init__(self) -> None:
        self.reads = 1.0
        self.writes = 1.0
        self.prefix = 1.0

    def slowed(self, rates: TierRates) -> TierRates:
        """Return the rates of this run from those measured before it."""
        return rates.slowed(reads=self.reads, writes=self.writes)

    def observe(
        self,
        segments: Sequence[SegmentRecord],
        inputs: PlanInputs,
        codec: Codec = "native",
    ) -> None:
        """Take in a pass.

        What tells nothing is left out: times of a segment in which few samples were
        found say little about reads, and those in which some were about the layers.

        Args:
            segments: Of the pass.
            inputs: What was measured before the run.
            codec: Of the records.
        """
        for segment in segments:
            if segment.shape.boundary > 0:
                self._observe(segment, inputs, codec)

    def _observe(
        self, segment: SegmentRecord, inputs: PlanInputs, codec: Codec
    ) -> None:
        profile, rates, workload = inputs.profile, inputs.rates, inputs.workload
        if profile is None or rates is None or workload is None:
            return
        shape, hits = segment.shape, segment.cache_hits
        boundary, replicas = shape.boundary, shape.num_replicas
        wide = profile.layers[boundary - 1].boundary_bytes_per_sample
        size = usual_bytes(wide, codec)
        late = segment.cache.get("late", 0)  # waited for, and read too late
        read, missed = hits + late, segment.cache_misses - late
        if read > missed:
            read_ns = read * rates.read_ns(size) + missed * rates.record_ns
            self.reads = _learned(self.reads, segment, "cache_read", read_ns)
        write_ns = segment.cache.get("stored", 0) * rates.write_ns(size)
        self.writes = _learned(self.writes, segment, "cache_write", write_ns)
        if hits == 0:
            rows = prefix_rows(workload.global_batch, replicas, shape.num_stages)
            each = prefix_ns(profile, boundary, rows) / shape.num_stages
            self.prefix = _learned(
                self.prefix, segment, "prefix", segment.samples * each
            )


def prefix_rows(global_batch: int, num_replicas: int, num_stages: int) -> int:
    """Return how many rows the frozen layers run at once: a worker's share."""
    return max(1, -(-global_batch // (num_replicas * num_stages)))


def _learned(
    before: float, segment: SegmentRecord, phase: str, expected_ns: float
) -> float:
    """Return a factor with what a segment says of it, over all replicas.

    They have equal shares; the clock is this rank's.
    """
    spent = segment.phase_seconds.get(f"forward/{phase}", 0.0) * _NANOSECONDS
    if spent <= 0 or expected_ns <= 0:
        return before
    found = spent * segment.shape.num_replicas / expected_ns
    return (before + min(max(found, 1 / _WIDEST), _WIDEST)) / 2
