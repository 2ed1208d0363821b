"""Counts what one pass over the training set really did, over all replicas.

A pass has one segment for each plan that it ran under. A segment is counted by each
replica alone, and added up over the group that it ran on before that group goes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer.replica import Replica
from pipetransformer.report import EpochRecord, PlanShape, SegmentRecord
from pipetransformer.run import Run


class Counts:
    """What this replica has done in the open segment.

    Args:
        run: The run.
        replica: What this rank drives.
        shape: The plan in force, for the records.
    """

    def __init__(self, run: Run, replica: Replica, shape: PlanShape) -> None:
        self.shape = shape
        self.first_step = run.state.step
        self._spent = run.clock.seconds()
        self._busy = replica.workers.cpu_seconds()
        self._loss_sum = 0.0
        self._rows = 0
        self._ids: list[Tensor] = []
        self._began: float | None = None
        self._durations: list[float] = []
        self._before = _cache_counts(run)

    def begin_step(self) -> None:
        """Note that a forward begins."""
        self._began = time.perf_counter()

    def first_step_extra_s(self) -> float | None:
        """Return what the first step took more than the others; None if unknown.

        From forward to the end of backward: the rest does not depend on the plan.
        """
        first, *others = self._durations or [0.0]
        if not others:
            return None
        return max(0.0, first - sum(others) / len(others))

    def count(self, loss: float, rows: int, ids: Tensor | None) -> None:
        """Add one step of this replica."""
        if self._began is not None:
            self._durations.append(time.perf_counter() - self._began)
            self._began = None
        if rows:
            self._loss_sum += loss * rows
            self._rows += rows
        if ids is not None:
            self._ids.append(ids)

    def add_up(self, run: Run, replica: Replica) -> tuple[SegmentRecord, Tensor]:
        """Reduce over the replicas; collective over the active group.

        Returns:
            The segment's record, and the sample ids of all replicas.

        Raises:
            RuntimeError: the replicas took different numbers of steps.
        """
        hits, misses = _cache_counts(run)
        mine = {
            "loss_sum": self._loss_sum,
            "rows": self._rows,
            "hits": hits - self._before[0],
            "misses": misses - self._before[1],
            "steps": run.state.step - self.first_step,
        }
        group = replica.group
        gathered = group.all_gather_bytes(json.dumps(mine).encode())
        parts = [json.loads(part) for part in gathered]
        steps = {part["steps"] for part in parts}
        if len(steps) != 1:
            raise RuntimeError(
                "optimizer steps of the pass: expected the same number on every "
                f"replica, got {[part['steps'] for part in parts]}; leave a pass on "
                "every active rank at the same batch"
            )
        spent = run.clock.since(self._spent)
        own = torch.cat([torch.empty(0, dtype=torch.int64), *self._ids])
        rows = sum(part["rows"] for part in parts)
        now = replica.workers.cpu_seconds()
        record = SegmentRecord(
            shape=self.shape,
            samples=rows,
            optimizer_steps=steps.pop(),
            seconds=sum(spent.values()),
            train_loss=sum(p["loss_sum"] for p in parts) / rows if rows else math.nan,
            cache_hits=sum(part["hits"] for part in parts),
            cache_misses=sum(part["misses"] for part in parts),
            phase_seconds=spent,
            worker_seconds=[b - a for a, b in zip(self._busy, now, strict=True)],
            predicted_step_ns=replica.plan.simulated_step_ns,
        )
        return record, torch.cat(group.all_gather_rows(own))


class Pass:
    """One pass over the training set: its finished segments, and the open one.

    Attributes:
        open: What this replica counts now; None between two segments.
        segments: What was added up, equal on every active rank but for the times.
    """

    def __init__(self) -> None:
        self.open: Counts | None = None
        self.segments: list[SegmentRecord] = []
        self._ids = torch.empty(0, dtype=torch.int64)

    def begin_step(self) -> None:
        """Note that a forward begins."""
        if self.open is not None:
            self.open.begin_step()

    def count(self, loss: float, rows: int, ids: Tensor | None) -> None:
        """Add one step of this replica."""
        if self.open is not None:
            self.open.count(loss, rows, ids)

    def close_segment(self, run: Run, replica: Replica) -> SegmentRecord | None:
        """Add up the open segment, if any; collective over the active group."""
        if self.open is None:
            return None
        record, ids = self.open.add_up(run, replica)
        self.open = None
        self.segments.append(record)
        self._ids = torch.cat([self._ids, ids])
        return record

    def record(self, run: Run) -> EpochRecord:
        """Return the record of the pass, once every segment is closed."""
        unique = len(set(self._ids.tolist()))
        return combine(
            run.state.epoch,
            self.segments,
            unique_samples=unique,
            elapsed_seconds=run.clock.elapsed(),
        )

    def to_bytes(self) -> bytes:
        """Serialise the finished segments, for a rank that becomes active."""
        buffer = io.BytesIO()
        segments = json.dumps([dataclasses.asdict(s) for s in self.segments])
        torch.save({"segments": segments, "ids": self._ids}, buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Pass:
        """Read what `to_bytes` gave."""
        content = torch.load(io.BytesIO(data), weights_only=True)
        made = cls()
        made._ids = content["ids"]
        for fields in json.loads(content["segments"]):
            shape = PlanShape(**fields.pop("shape"))
            made.segments.append(SegmentRecord(shape=shape, **fields))
        return made


def combine(
    epoch: int,
    segments: Sequence[SegmentRecord],
    *,
    unique_samples: int,
    elapsed_seconds: float,
) -> EpochRecord:
    """Add up the segments of a pass; its shape is the last one's."""
    samples = sum(s.samples for s in segments)
    steps = sum(s.optimizer_steps for s in segments)
    losses = math.fsum(s.train_loss * s.samples for s in segments if s.samples)
    phases: dict[str, float] = {}
    workers: list[float] = []
    for segment in segments:
        for name, seconds in segment.phase_seconds.items():
            phases[name] = phases.get(name, 0.0) + seconds
        missing = len(segment.worker_seconds) - len(workers)
        workers += [0.0] * missing
        for stage, seconds in enumerate(segment.worker_seconds):
            workers[stage] += seconds
    predicted = sum(s.predicted_step_ns * s.optimizer_steps for s in segments)
    last = segments[-1]
    return EpochRecord(
        epoch=epoch,
        shape=last.shape,
        samples=samples,
        unique_samples=unique_samples,
        optimizer_steps=steps,
        seconds=sum(phases.values()),
        train_loss=losses / samples if samples else math.nan,
        cache_hits=sum(s.cache_hits for s in segments),
        cache_misses=sum(s.cache_misses for s in segments),
        phase_seconds=phases,
        worker_seconds=workers,
        elapsed_seconds=elapsed_seconds,
        predicted_step_ns=round(predicted / steps) if steps else last.predicted_step_ns,
        segments=list(segments),
    )


def _cache_counts(run: Run) -> tuple[int, int]:
    cache = run.training_cache()
    if cache is None:
        return 0, 0
    return cache.counters.hits, cache.counters.misses
