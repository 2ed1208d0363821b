"""One training pass on an active rank: steps, scaled losses, exact accounting."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.data import Batch
from pipetransformer.replica import rows_of
from pipetransformer.report.history import EpochRecord, PlanShape
from pipetransformer.run import Run
from pipetransformer.transformation import Replica


class Pass:
    """Counts what one pass over the training set really did, over all replicas."""

    def __init__(self, run: Run, shape: PlanShape) -> None:
        self._shape = shape
        self._start = time.perf_counter()
        self._first_step = run.state.step
        self._loss_sum = 0.0
        self._rows = 0
        self._ids: list[Tensor] = []
        self._before = self._cache_counts(run)

    @staticmethod
    def _cache_counts(run: Run) -> tuple[int, int]:
        cache = run.cache("train")
        if cache is None:
            return 0, 0
        counters = cache.counters
        return counters.hits, counters.misses

    def count(self, loss: float, rows: int, ids: Tensor | None) -> None:
        """Add one step of this replica."""
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
            "ids": torch.cat(self._ids).tolist() if self._ids else [],
        }
        parts = [
            json.loads(part)
            for part in replica.group.all_gather_bytes(json.dumps(mine).encode())
        ]
        steps = {part["steps"] for part in parts}
        if len(steps) != 1:
            raise RuntimeError(
                "optimizer steps of the pass: expected the same number on every "
                f"replica, got {[part['steps'] for part in parts]}; leave a pass on "
                "every active rank at the same batch"
            )
        rows = sum(part["rows"] for part in parts)
        seen = [sample for part in parts for sample in part["ids"]]
        return EpochRecord(
            epoch=run.state.epoch,
            shape=self._shape,
            samples=rows,
            unique_samples=len(set(seen)),
            optimizer_steps=steps.pop(),
            seconds=time.perf_counter() - self._start,
            train_loss=sum(p["loss_sum"] for p in parts) / rows if rows else math.nan,
            cache_hits=sum(part["hits"] for part in parts),
            cache_misses=sum(part["misses"] for part in parts),
        )


def backward(run: Run, replica: Replica, loss: Tensor, batch: Batch | None) -> None:
    """Run backward with the loss weighted by rows.

    DDP averages over the replicas; the mean over all rows of the batch is that average
    of ``loss * R * rows / global_rows``.
    """
    if batch is not None and batch.rows > 0:
        size = replica.group.size
        if batch.rows * size != batch.global_rows:
            loss = loss * (size * batch.rows / batch.global_rows)
    with run.guarded():
        loss.backward()  # type: ignore[no-untyped-call]
    if run.gradients is not None:
        run.gradients.accumulate(replica.plan.boundary)


def step(run: Run, replica: Replica, batch: Batch | Any, targets: Any = None) -> Tensor:
    """Forward, backward, all-reduce, clipping, optimizer, scheduler.

    Returns:
        This replica's mean loss, detached, ``()``; zero when it had no rows.

    Raises:
        FloatingPointError: the loss is NaN or Inf; no weight has been changed.
        PeerFailure: a peer died.
    """
    bundle = batch if isinstance(batch, Batch) else None
    ddp = replica.ddp
    if not isinstance(ddp, DistributedDataParallel):
        raise RuntimeError("step on a replica that was retired; please report")
    with run.guarded():
        outputs = ddp(batch)
    empty = bundle is not None and bundle.rows == 0
    wanted = bundle.targets if bundle is not None else targets
    loss = outputs if empty else run.recipe.loss(outputs, wanted)
    value = _checked(run, loss)
    backward(run, replica, loss, bundle)
    update(run, replica)
    rows = bundle.rows if bundle is not None else rows_of(batch)
    if run.current_pass is not None:
        ids = bundle.ids if bundle is not None else None
        run.current_pass.count(value, rows, ids)
    return loss.detach()


def _checked(run: Run, loss: Tensor) -> float:
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
    """Clip, step optimizer and scheduler, clear gradients, count the step."""
    state = run.state
    if state.optimizer is None:
        raise RuntimeError("step without an optimizer; please report")
    if run.config.clip_grad_norm is not None:
        active = [p for p in replica.active_model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(active, run.config.clip_grad_norm)
    # A checkpoint must not catch weights between two optimizer steps.
    run.consistent = False
    state.optimizer.step()
    if state.scheduler is not None:
        state.scheduler.step()
    state.step += 1
    state.batch += 1
    run.consistent = True
    state.optimizer.zero_grad(set_to_none=True)
