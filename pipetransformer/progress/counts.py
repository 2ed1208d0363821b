"""Counts what one pass over the training set really did, over all replicas.

A pass has one segment for each plan that it ran under. A segment is counted by each
replica alone, and added up over the group that it ran on before that group goes.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipetransformer.autodp import gather_at
from pipetransformer.data import Batch
from pipetransformer.replica.replica import Replica
from pipetransformer.report import EpochRecord, PlanShape, SegmentRecord
from pipetransformer.run.context import Run
from pipetransformer.run.step_loss import StepLoss


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
        self.first_step_seconds = 0.0  # more than others, of the first of a plan
        self._spent = run.clock.seconds()
        self._busy = replica.workers.cpu_seconds()
        self._interval = run.state.losses
        self._loss_sum = 0.0
        self._weight = 0.0
        self._rows = 0
        self._ids: list[Tensor] = []
        self._batches: list[int] = []
        self._only_batches = True  # no step on bare inputs
        self._pending: list[tuple[StepLoss, float, int, Batch | None]] = []
        self._unread: list[tuple[StepLoss, float]] = []  # settled, with their weights
        self._ended = False  # the optimizer step of what is pending is due
        self._state = run.state
        self._counted_at = -1  # optimizer steps done when a batch was counted last
        self._began_at = run.clock.elapsed()
        self._began: float | None = None
        self._durations: list[float] = []
        self._begins: list[float] = []  # of whole batches
        self._before = _cache_counts(run)

    def begin_step(self) -> None:
        """Note that a forward begins, and that the step before is done."""
        if self._state.step != self._counted_at:  # else it may be the same batch again
            self.settle()
        self._began = time.perf_counter()
        self._begins.append(self._began)

    def first_step_extra_s(self) -> float | None:
        """Return what the first step took more than the others; None if unknown.

        From forward to the end of backward: the rest does not depend on the plan.
        """
        first, *others = self._durations or [0.0]
        if not others:
            return None
        return max(0.0, first - sum(others) / len(others))

    def batch_seconds(self, per_step: int) -> list[float]:
        """Return what each batch took, all that a script does included.

        The first step under a plan is left out.

        Args:
            per_step: Batches of an optimizer step, which are taken together.
        """
        begins = [*self._begins, time.perf_counter()]
        firsts = range(per_step, len(self._begins), per_step)
        nexts = (min(first + per_step, len(self._begins)) for first in firsts)
        return [
            (begins[end] - begins[first]) / (end - first)
            for first, end in zip(firsts, nexts, strict=True)
        ]

    def count(
        self,
        loss: StepLoss,
        weight: float,
        rows: int,
        batch: Batch | None,
        *,
        ends: bool = True,
    ) -> None:
        """Add one batch of this replica, once it is settled.

        A batch that takes several backwards for one optimizer step counts once, with
        the loss of the last.

        Args:
            loss: Of its rows, a mean.
            weight: Of how many.
            rows: How many it had.
            batch: None where the rows are not those of the engine.
            ends: The optimizer steps with it; else it waits for one with which it does.

        Raises:
            FloatingPointError: a loss before it that was on a device is NaN or Inf.
        """
        self.catch_up()
        if self._began is not None:
            self._durations.append(time.perf_counter() - self._began)
            self._began = None
        again = batch is not None and self._counted_at == self._state.step
        if again and self._pending and self._pending[-1][-1] is batch:
            self._pending.pop()
        else:
            self.settle()  # of a loop whose forward is not the engine's
        self._counted_at = self._state.step
        self._pending.append((loss, weight, rows, batch))
        self._ended = ends

    def settle(self) -> None:
        """Add the step that was counted last: the optimizer has stepped.

        Losses that are still on a device are added when they are read.
        """
        if not self._ended:
            return
        for loss, weight, rows, batch in self._pending:
            self._rows += rows
            self._weight += weight
            self._unread.append((loss, weight))
            if self._interval is not None:
                self._interval.add(loss.read, weight)
            if batch is None:
                self._only_batches = False
            else:
                self._ids.append(batch.ids)
                self._batches.append(batch.index)
        self._pending.clear()
        self._ended = False
        if all(loss.is_known for loss, _ in self._unread):
            self.read()

    @property
    def is_behind(self) -> bool:
        """Whether a loss was not read yet, as it was on a device."""
        if not (self._pending or self._unread):
            return False  # as between steps on the host
        late = [loss for loss, *_ in self._pending] + [loss for loss, _ in self._unread]
        return not all(loss.is_known for loss in late)

    def catch_up(self) -> None:
        """Read the losses of all batches so far, of a step that is under way, too.

        Raises:
            FloatingPointError: one that was on a device is NaN or Inf.
        """
        self.read()
        for loss, *_ in self._pending:
            loss.read()

    def read(self) -> None:
        """Add the losses of what is settled.

        Raises:
            FloatingPointError: one that was on a device is NaN or Inf; it is left out.
        """
        while self._unread:
            loss, weight = self._unread.pop(0)
            self._loss_sum += loss.read() * weight

    @property
    def batches(self) -> list[int]:
        """Numbers of the batches that were counted; a step that broke off is not."""
        return self._batches

    def due(self) -> dict[str, Any]:
        """Return what is counted with the optimizer step that is under way.

        The step is another replica's, too, which may have taken it when a rank fails.
        """
        pending = self._pending if self._ended else []
        return {
            "loss_sum": sum(loss.value * weight for loss, weight, _, _ in pending),
            "weight": sum(weight for _, weight, _, _ in pending),
            "rows": sum(rows for _, _, rows, _ in pending),
            "batches": [each.index for *_, each in pending if each is not None],
        }

    def mine(self, run: Run) -> dict[str, Any]:
        """Return what this replica has counted, as plain values."""
        unread = sum(loss.value * weight for loss, weight in self._unread)
        cache = run.caches.training()
        return {
            "loss_sum": self._loss_sum + unread,
            "weight": self._weight,
            "rows": self._rows,
            "cache": {
                kind: count - self._before.get(kind, 0)
                for kind, count in _cache_counts(run).items()
            },
            "cache_bytes": {run.info.node: cache.used_bytes if cache else 0},
            "cache_disk_bytes": {run.info.node: cache.disk_used_bytes if cache else 0},
            "recomputed": 0 if run.in_force.caches else self._rows,
            "steps": run.state.step - self.first_step,
        }

    def add_up(self, run: Run, replica: Replica) -> tuple[SegmentRecord, Tensor]:
        """Reduce over the replicas; collective over the active group.

        Returns:
            The segment's record, and the sample ids of all replicas.

        Raises:
            RuntimeError: the replicas took different numbers of steps, or steps with
                different batches.
        """
        self.settle()
        self.read()
        group = replica.group
        taken = spans_of(self._batches) if self._only_batches else None
        mine = json.dumps({**self.mine(run), "taken": taken}).encode()
        gathered = gather_at(group, "the end of a pass", mine)
        parts = [json.loads(part) for part in gathered]
        check_taken(dict(zip(group.members, (p["taken"] for p in parts), strict=True)))
        steps = {part["steps"] for part in parts}
        if len(steps) != 1:
            raise RuntimeError(
                "optimizer steps of the pass: expected the same number on every "
                f"replica, got {[part['steps'] for part in parts]}; leave a pass on "
                "every active rank at the same batch"
            )
        own = torch.cat([torch.empty(0, dtype=torch.int64), *self._ids])
        record = self.record(run, replica, parts)
        return record, torch.cat(group.all_gather_rows(own))

    def record(
        self,
        run: Run,
        replica: Replica | None,
        parts: Sequence[Mapping[str, Any]],
        samples: int | None = None,
    ) -> SegmentRecord:
        """Return the record of the segment from what the replicas have counted.

        Args:
            run: The run.
            replica: What this rank drives; None if it is gone already.
            parts: From `mine` of each replica.
            samples: Samples seen, where not every replica's part is known; the loss
                is then the mean over those that are.
        """
        since = run.clock.since(self._spent)
        spent = {n: s for n, s in since.items() if "recovery" not in n.split("/")}
        rows = sum(part["rows"] for part in parts)
        weight = sum(part["weight"] for part in parts)
        now = replica.workers.cpu_seconds() if replica is not None else self._busy
        # Plans are made for batches, records tell of optimizer steps.
        plan = replica.plan if replica is not None else None
        each = plan.simulated_step_ns if plan is not None else 0
        pace, cluster = run.costs.steps.pace, run.inputs.cluster
        shared: float = run.config.accumulation_steps
        if run.inputs.workload is not None:
            shared = run.inputs.workload.batches_per_step(run.config.accumulation_steps)
        predicted = round(each * shared * pace)
        return SegmentRecord(
            shape=self.shape,
            samples=rows if samples is None else samples,
            optimizer_steps=run.state.step - self.first_step,
            seconds=sum(spent.values()),
            train_loss=(
                sum(p["loss_sum"] for p in parts) / weight if weight else math.nan
            ),
            weight=weight,
            cache_hits=sum(part["cache"].get("hits", 0) for part in parts),
            cache_misses=sum(part["cache"].get("misses", 0) for part in parts),
            cache=_cache_record(parts),
            phase_seconds=spent,
            worker_seconds=[b - a for a, b in zip(self._busy, now, strict=True)],
            predicted_step_ns=predicted,
            pace=pace,
            began_seconds=self._began_at,
            cuts=list(plan.cuts) if plan is not None else [],
            schedule=plan.schedule if plan is not None else "gpipe",
            prefix=plan.prefix if plan is not None else "none",
            bytes_per_stage=list(plan.bytes_per_stage) if plan is not None else [],
            slot_bytes=cluster.device_memory_bytes if cluster is not None else 0,
            learning_rate=run.state.learning_rate,
            first_step_seconds=self.first_step_seconds,
        )


def spans_of(numbers: Sequence[int]) -> list[list[int]]:
    """Return numbers as a list of spans: the first and the last of each."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def check_taken(spans: Mapping[int, Sequence[Sequence[int]] | None]) -> None:
    """Refuse what replicas have trained on if it was not the same batches.

    Args:
        spans: By rank: from `spans_of` what it has taken; None: it does not know.

    Raises:
        RuntimeError: they differ; it names batches that some have left out.
    """
    known = [each for each in spans.values() if each is not None]
    if len(known) < len(spans) or all(each == known[0] for each in known):
        return
    taken = {
        rank: {n for first, last in each or () for n in range(first, last + 1)}
        for rank, each in spans.items()
    }
    everything = set[int]().union(*taken.values())
    left_out = [
        f"none with batch {min(everything - mine)} on rank {rank}"
        for rank, mine in taken.items()
        if everything - mine
    ]
    raise RuntimeError(
        "batches of the pass: expected steps with the same ones on every replica, got "
        f"{', '.join(left_out) or 'them in another order'}; leave out a batch on every "
        "active rank, or on none"
    )


class Pass:
    """One pass over the training set: its finished segments, and the open one.

    Attributes:
        open: What this replica counts now; None between two segments.
        segments: What was added up, equal on every active rank except for the times.
    """

    def __init__(self) -> None:
        self.open: Counts | None = None
        self.segments: list[SegmentRecord] = []
        self._ids = torch.empty(0, dtype=torch.int64)

    def begin_step(self) -> None:
        """Note that a forward begins."""
        if self.open is not None:
            self.open.begin_step()

    def count(
        self,
        loss: StepLoss,
        weight: float,
        rows: int,
        batch: Batch | None,
        *,
        ends: bool = True,
    ) -> None:
        """Add one batch of this replica, once it is settled; see `Counts.count`."""
        if self.open is not None:
            self.open.count(loss, weight, rows, batch, ends=ends)

    def settle(self) -> None:
        """Add the step that was counted last: the optimizer has stepped."""
        if self.open is not None:
            self.open.settle()

    @property
    def is_behind(self) -> bool:
        """Whether a loss was not read yet, as it was on a device."""
        return self.open is not None and self.open.is_behind

    def catch_up(self) -> None:
        """Read the losses of all batches so far; see `Counts.catch_up`."""
        if self.open is not None:
            self.open.catch_up()

    def close_segment(self, run: Run, replica: Replica) -> None:
        """Add up the open segment, if any; collective over the active group."""
        if self.open is None:
            return
        record, ids = self.open.add_up(run, replica)
        if record.optimizer_steps or record.samples or not self.segments:
            self.append(record, ids)
        self.open = None

    def append(self, record: SegmentRecord, ids: Tensor) -> None:
        """Take in the open segment, added up, with the sample ids of all replicas."""
        self.open = None
        self.segments.append(record)
        self._ids = torch.cat([self._ids, ids])

    def record(self, run: Run) -> EpochRecord:
        """Return the record of the pass, once every segment is closed."""
        unique = torch.unique(self._ids).numel()
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
        segments = json.loads(content["segments"])
        made.segments = [SegmentRecord.from_fields(each) for each in segments]
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
    weight = sum(s.weight for s in segments)
    losses = math.fsum(s.train_loss * s.weight for s in segments if s.weight)
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
        train_loss=losses / weight if weight else math.nan,
        cache_hits=sum(s.cache_hits for s in segments),
        cache_misses=sum(s.cache_misses for s in segments),
        cache=_add_up([s.cache for s in segments]),
        phase_seconds=phases,
        worker_seconds=workers,
        elapsed_seconds=elapsed_seconds,
        predicted_step_ns=round(predicted / steps) if steps else last.predicted_step_ns,
        pace=last.pace,
        segments=list(segments),
    )


# Of `DiskTraffic`, in its order.
_MOVED = (
    "disk_read_bytes",
    "disk_read_ns",
    "disk_wait_ns",
    "disk_written_bytes",
    "disk_write_ns",
)


def _cache_counts(run: Run) -> dict[str, int]:
    cache = run.caches.training()
    if cache is None:
        return {}
    moved = dataclasses.asdict(cache.disk_traffic).values()
    disk = dict(zip(_MOVED, moved, strict=True))
    return {**dataclasses.asdict(cache.counters), **disk}


def _cache_record(parts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return misses by kind and what was written, over replicas; bytes over nodes."""
    counts: dict[str, int] = collections.Counter()
    for part in parts:
        counts.update(part["cache"])
    recomputed = sum(part["recomputed"] for part in parts)
    told = {"recomputed": recomputed} if recomputed else {}
    if not counts:
        return told
    kinds = ("stale", "changed", "corrupt", "late", "stored", "full", "audited")
    absent = counts["misses"] - sum(counts[kind] for kind in kinds[:4])
    found = {kind: counts[kind] for kind in (*kinds, "disk_hits")}
    found |= {kind: counts[kind] for kind in ("device_hits",) if counts[kind] > 0}
    moved = {kind: counts[kind] for kind in _MOVED if counts[kind] > 0}
    return {"absent": absent, **found, **_node_bytes(parts), **told, **moved}


def _node_bytes(parts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return what records take in memory and on disk, over nodes."""
    total = {}
    for kind in ("bytes", "disk_bytes"):
        nodes: dict[str, int] = {}
        for part in parts:
            nodes.update(part[f"cache_{kind}"])
        total[kind] = sum(nodes.values())
    return total


def _add_up(records: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts; bytes are those of the last record that has them."""
    total: dict[str, int] = collections.Counter()
    for record in records:
        total.update(record)
        for kind in ("bytes", "disk_bytes"):
            if kind in record:
                total[kind] = record[kind]
    return dict(total)
