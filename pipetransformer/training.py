"""One training pass on an active rank: steps, scaled losses, exact accounting."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.data import Batch
from pipetransformer.report.history import EpochRecord, PlanShape
from pipetransformer.rows import rows_of
from pipetransformer.run import Run
from pipetransformer.transformation import Replica


class Pass:
    """Counts what one pass over the training set really did, over all replicas."""

    def __init__(self, run: Run, replica: Replica, shape: PlanShape) -> None:
        self._shape = shape
        self._spent = run.clock.seconds()
        self._busy = replica.workers.cpu_seconds()
        self._first_step = run.state.step
        self._loss_sum = 0.0
        self._rows = 0
        self._ids: list[Tensor] = []
        self._began: float | None = None
        self._durations: list[float] = []
        self._before = self._cache_counts(run)

    @staticmethod
    def _cache_counts(run: Run) -> tuple[int, int]:
        cache = run.training_cache()
        if cache is None:
            return 0, 0
        return cache.counters.hits, cache.counters.misses

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

    def close(self, run: Run, replica: Replica) -> EpochRecord:
        """Reduce over the replicas; collective over the active group."""
        hits, misses = self._cache_counts(run)
        mine = {
            "loss_sum": self._loss_sum,
            "rows": self._rows,
            "hits": hits - self._before[0],
            "misses": misses - self._before[1],
            "steps": run.state.step - self._first_step,
        }
        group = replica.group
        parts = [
            json.loads(part)
            for part in group.all_gather_bytes(json.dumps(mine).encode())
        ]
        steps = {part["steps"] for part in parts}
        if len(steps) != 1:
            raise RuntimeError(
                "optimizer steps of the pass: expected the same number on every "
                f"replica, got {[part['steps'] for part in parts]}; leave a pass on "
                "every active rank at the same batch"
            )
        spent = run.clock.since(self._spent)
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *self._ids])
        seen = torch.cat(group.all_gather_rows(ids))
        rows = sum(part["rows"] for part in parts)
        return EpochRecord(
            epoch=run.state.epoch,
            shape=self._shape,
            samples=rows,
            unique_samples=len(set(seen.tolist())),
            optimizer_steps=steps.pop(),
            seconds=sum(spent.values()),
            train_loss=sum(p["loss_sum"] for p in parts) / rows if rows else math.nan,
            cache_hits=sum(part["hits"] for part in parts),
            cache_misses=sum(part["misses"] for part in parts),
            phase_seconds=spent,
            elapsed_seconds=run.clock.elapsed(),
            predicted_step_ns=replica.plan.simulated_step_ns,
            worker_seconds=[
                now - before
                for now, before in zip(
                    replica.workers.cpu_seconds(), self._busy, strict=True
                )
            ],
        )


def forward_loss(
    run: Run, replica: Replica, batch: Batch | Any, targets: Any = None
) -> Tensor:
    """Run the model and the loss on a batch.

    Returns:
        The mean loss over this replica's rows, ``()``; zero when it has none.

    Raises:
        ValueError: the loss is no scalar.
        FloatingPointError: the loss is NaN or Inf.
        PeerFailure: a peer died.
    """
    bundle = batch if isinstance(batch, Batch) else None
    if replica.ddp is None:
        raise RuntimeError("forward of a replica that was retired; please report")
    if run.current_pass is not None:
        run.current_pass.begin_step()
    with run.clock.phase("forward"):
        with run.guarded():
            outputs = replica.ddp(batch)
        if bundle is not None and bundle.rows == 0:
            loss: Tensor = outputs
        else:
            wanted = bundle.targets if bundle is not None else targets
            loss = run.recipe.loss(outputs, wanted)
        _finite(run, loss)
    return loss


def backward(
    run: Run, replica: Replica, loss: Tensor, batch: Batch | None, rows: int
) -> None:
    """Run backward with the loss weighted by rows, and count the batch.

    DDP averages over the replicas; the mean over all rows of the batch is that average
    of ``loss * R * rows / global_rows``.

    Raises:
        FloatingPointError: the loss is NaN or Inf; no gradient was changed.
    """
    value = _finite(run, loss)
    size = replica.group.size
    if batch is not None and rows > 0 and rows * size != batch.global_rows:
        loss = loss * (size * rows / batch.global_rows)
    with run.clock.phase("backward"):
        replica.last_gradient.at = 0.0
        with run.guarded():
            loss.backward()  # type: ignore[no-untyped-call]
        if size > 1 and replica.last_gradient.at > 0:
            run.clock.split("all_reduce", replica.last_gradient.at)
    if run.gradients is not None:
        run.gradients.accumulate(replica.plan.boundary)
    if run.current_pass is not None:
        run.current_pass.count(value, rows, batch.ids if batch is not None else None)


def step(run: Run, replica: Replica, batch: Batch | Any, targets: Any = None) -> Tensor:
    """Forward, backward, all-reduce, clipping, optimizer, scheduler.

    Returns:
        This replica's mean loss, detached, ``()``; zero when it had no rows.

    Raises:
        FloatingPointError: the loss is NaN or Inf; no weight has been changed.
        PeerFailure: a peer died.
    """
    bundle = batch if isinstance(batch, Batch) else None
    loss = forward_loss(run, replica, batch, targets)
    rows = bundle.rows if bundle is not None else rows_of(batch)
    backward(run, replica, loss, bundle, rows)
    update(run, replica)
    return loss.detach()


def _finite(run: Run, loss: Tensor) -> float:
    if loss.dim() != 0:
        raise ValueError(
            f"loss: expected a scalar mean over rows, got shape {tuple(loss.shape)}"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(
            f"loss: expected a finite value, got {value} at step {run.state.step} on "
            f"rank {run.info.rank}"
        )
    return value


def update(run: Run, replica: Replica) -> None:
    """Clip, step optimizer and scheduler, clear gradients."""
    state = run.state
    if state.optimizer is None:
        raise RuntimeError("step without an optimizer; please report")
    with run.clock.phase("optimizer"):
        if run.config.clip_grad_norm is not None:
            active = [p for p in replica.active_model.parameters() if p.requires_grad]
            nn.utils.clip_grad_norm_(active, run.config.clip_grad_norm)
        state.optimizer.step()
        if state.scheduler is not None:
            run.consistent = False
            state.scheduler.step()
            run.consistent = True
        state.optimizer.zero_grad(set_to_none=True)
