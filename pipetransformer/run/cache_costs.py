"""What the cache and the frozen layers take in this run, as one rank measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipetransformer import autocache
from pipetransformer.autocache import CacheRates, Codec, TierRates, usual_bytes
from pipetransformer.config import CacheConfig
from pipetransformer.core.devices import HOST
from pipetransformer.data.structures import tensors_of
from pipetransformer.planner import Profile
from pipetransformer.report import SegmentRecord
from pipetransformer.run.arguments import Workload
from pipetransformer.run.plan_inputs import PlanInputs

_NANOSECONDS = 1e9
_MOST_ROWS = 64  # of a batch with which rates are measured
_WIDEST = 64.0
"""A pass is taken to be at most that many times as slow or fast as measured before."""
_WIDEST_DISK = 2.0**20
"""The same of disks, which may turn from memory's speed to that of a network."""


def rates_before_run(
    workload: Workload,
    profile: Profile,
    inputs: Any,
    config: CacheConfig,
    device: torch.device = HOST,
) -> CacheRates:
    """Measure reads and writes of records as wide as the run's.

    Args:
        workload: Of the run.
        profile: Of the layers.
        inputs: Of some rows, which look-ups hash unless the dataset names them.
        config: Says where records are kept besides.
        device: Where what is read is used.
    """
    wide = max(layer.boundary_bytes_per_sample for layer in profile.layers)
    rows = min(workload.global_batch, _MOST_ROWS)
    hashed = tensors_of(inputs) if workload.hashes else ()
    host = autocache.measure_rates(
        wide,
        rows=rows,
        num_samples=workload.num_samples,
        hashed=hashed,
        device=device,
    )
    disk = near = None
    if host is not None and config.disk_directory is not None:
        disk = autocache.measure_disk_rates(
            wide, config.disk_directory, num_samples=workload.num_samples
        )
    if host is not None and config.device_bytes is not None and device != HOST:
        near = autocache.measure_device_rates(
            wide,
            device,
            rows=rows,
            num_samples=workload.num_samples,
            hashed=hashed,
        )
    return CacheRates(host, disk, near)


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
    return _row_ns(profile, columns, rows)


def active_ns(profile: Profile, boundary: int, rows: int) -> float:
    """Return what forward and backward of the rest take for a sample, by a profile.

    Args:
        profile: Of the layers.
        boundary: The first of them.
        rows: Of a micro-batch, at least 1.
    """
    layers = profile.layers[boundary:]
    columns = [
        column
        for layer in layers
        for column in (layer.forward_ns, layer.input_grad_ns, layer.weight_grad_ns)
    ]
    return _row_ns(profile, columns, rows)


def _row_ns(profile: Profile, columns: Sequence[Sequence[int]], rows: int) -> float:
    """Return the sum of some columns of a profile, for one of so many rows."""
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
        reads: Of reads from the cache in host memory.
        writes: Of writes to it.
        disk_reads: Of reads from its disk.
        disk_writes: Of writes to it.
        prefix: Of the frozen layers.
    """

    def __init__(self) -> None:
        self.reads = 1.0
        self.writes = 1.0
        self.disk_reads = 1.0
        self.disk_writes = 1.0
        self.prefix = 1.0

    def slowed(self, rates: TierRates) -> TierRates:
        """Return the rates of this run from those measured before it."""
        return rates.slowed(reads=self.reads, writes=self.writes)

    def slowed_disk(self, rates: TierRates) -> TierRates:
        """Return the same for the disk."""
        return rates.slowed(reads=self.disk_reads, writes=self.disk_writes)

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
        profile, rates, workload = inputs.profile, inputs.rates.host, inputs.workload
        if profile is None or rates is None or workload is None:
            return
        shape, hits = segment.shape, segment.cache_hits
        boundary, replicas = shape.boundary, shape.num_replicas
        wide = profile.layers[boundary - 1].boundary_bytes_per_sample
        size = usual_bytes(wide, codec)
        counts, missed = segment.cache, segment.cache_misses
        copied, near = counts.get("device_hits", 0), inputs.rates.device
        read = hits - copied
        read_ns = read * rates.read_ns(size) + missed * rates.record_ns
        copied_ns = copied * near.read_ns(wide) if near is not None else 0.0
        # The time spent holds reads of copies, too, which count as measured before the
        # run; where they are most of it, it says little of what comes from the host.
        told = copied == 0 or (near is not None and read_ns > copied_ns)
        if read > missed and told:
            spent = _spent(segment, "cache_read") - counts.get("disk_wait_ns", 0)
            self.reads = _learned(self.reads, spent, read_ns + copied_ns)
        if not counts.get("disk_written_bytes"):
            write_ns = counts.get("stored", 0) * rates.write_ns(size)
            self.writes = _learned(
                self.writes, _spent(segment, "cache_write"), write_ns
            )
        if inputs.rates.disk is not None:
            sharers = disk_sharers(inputs, replicas)
            self._observe_disk(counts, inputs.rates.disk, sharers, size)
        if hits == 0 and segment.prefix != "filled":  # else it ran beside the rest
            rows = prefix_rows(workload.global_batch, replicas, shape.num_stages)
            each = prefix_ns(profile, boundary, rows) / shape.num_stages
            self.prefix = _learned(
                self.prefix, _spent(segment, "prefix"), segment.samples * each
            )

    def _observe_disk(
        self, counts: Mapping[str, int], rates: TierRates, sharers: int, size: int
    ) -> None:
        """Take in what the replicas that share a disk have moved, and how long.

        Where nothing arrived, it took at least that long for one record.
        """
        shared = rates.slowed(reads=sharers, writes=sharers)
        self.disk_reads = _learned(
            self.disk_reads,
            counts.get("disk_read_ns", 0),
            shared.read_ns(max(size, counts.get("disk_read_bytes", 0))),
            widest=_WIDEST_DISK,
        )
        self.disk_writes = _learned(
            self.disk_writes,
            counts.get("disk_write_ns", 0),
            shared.write_ns(max(size, counts.get("disk_written_bytes", 0))),
            widest=_WIDEST_DISK,
        )


def prefix_rows(global_batch: int, num_replicas: int, num_stages: int) -> int:
    """Return how many rows the frozen layers run at once: a worker's share."""
    return max(1, -(-global_batch // (num_replicas * num_stages)))


def disk_sharers(inputs: PlanInputs, num_replicas: int) -> int:
    """Return how many replicas read from the disk of one node."""
    nodes = 1 if inputs.cluster is None else inputs.cluster.num_nodes
    return -(-num_replicas // nodes)


def _spent(segment: SegmentRecord, phase: str) -> float:
    """Return what all replicas spent, in ns, by this rank's clock: shares are equal."""
    seconds = segment.phase_seconds.get(f"forward/{phase}", 0.0)
    return seconds * segment.shape.num_replicas * _NANOSECONDS


def _learned(
    before: float, spent_ns: float, expected_ns: float, *, widest: float = _WIDEST
) -> float:
    """Return a factor with what a segment says of it."""
    if spent_ns <= 0 or expected_ns <= 0:
        return before
    found = spent_ns / expected_ns
    return (before + min(max(found, 1 / widest), widest)) / 2
