"""One training step on an active rank: forward, scaled loss, backward, update."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.data import Batch
from pipetransformer.data.structures import rows_of, tensors_of
from pipetransformer.loop.loss_check import checked_loss
from pipetransformer.progress.counts import Pass
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run


def forward_loss(
    run: Run,
    replica: Replica,
    counted: Pass | None,
    batch: Batch | Any,
    targets: Any = None,
) -> Tensor:
    """Run the model and the loss on a batch.

    Args:
        run: The run.
        replica: What this rank drives.
        counted: The pass that the step belongs to; None outside of one.
        batch: A batch of the engine, or bare inputs.
        targets: With bare inputs: their targets.

    Returns:
        The mean loss over this replica's rows, ``()``; zero when it has none.

    Raises:
        ValueError: the loss is no scalar, or the first one no mean over rows.
        FloatingPointError: the loss is NaN or Inf.
        PeerFailure: a peer died.
    """
    bundle = batch if isinstance(batch, Batch) else None
    model = replica.trained
    if model is None:
        raise RuntimeError("forward of a replica that was retired; please report")
    if counted is not None:
        counted.begin_step()
    with run.clock.phase("forward"):
        outputs = model(batch)
        if bundle is not None and bundle.rows == 0:
            loss: Tensor = outputs
        else:
            wanted = bundle.targets if bundle is not None else targets
            counts = run.arguments.loss_weight is not None
            if counts and weight_of(run, wanted, 1) == 0:
                loss = _zero_of(outputs)
            else:
                loss = _loss_of(run, outputs, wanted)
        run.last_loss = finite(run, loss)
    return loss


def weight_of(run: Run, targets: Any, rows: int) -> float:
    """Return how many a loss is the mean of: the rows, or what the user counts."""
    count = run.arguments.loss_weight
    return rows if count is None else float(count(targets))


def _zero_of(outputs: Any) -> Tensor:
    """Return a loss of nothing: zero, with gradients of zero."""
    parts = [t.sum() for t in tensors_of(outputs) if t.is_floating_point()]
    return torch.stack(parts).sum() * 0.0


def _loss_of(run: Run, outputs: Any, targets: Any) -> Tensor:
    if run.loss_checked:
        return run.arguments.loss(outputs, targets)
    value = checked_loss(run.arguments.loss, outputs, targets)
    run.loss_checked = True
    return value


def backward(
    run: Run,
    replica: Replica,
    counted: Pass | None,
    loss: Tensor,
    value: float,
    batch: Batch | None,
    rows: int,
) -> None:
    """Run backward with the loss weighted by rows, and count the batch.

    DDP averages over the replicas; the mean over all rows of the batch is that average
    of ``loss * R * rows / global_rows``. Where the user counts something else, such
    as tokens, the replicas add that up first.

    Args:
        run: The run.
        replica: What this rank drives.
        counted: The pass that the step belongs to; None outside of one.
        loss: Of this replica's rows.
        value: The same as a finite number.
        batch: None where the rows are not those of the engine.
        rows: How many.
    """
    size, weight = replica.group.size, float(rows)
    if run.arguments.loss_weight is not None:
        if batch is None:
            raise ValueError(
                "loss_weight: expected batches of engine.batches, got bare inputs"
            )
        weight = weight_of(run, batch.targets, rows) if rows else 0.0
        total = weight
        if size > 1:
            part = torch.tensor([weight], dtype=torch.float64)
            total = float(replica.group.all_reduce_(part))
    else:
        total = weight * size if batch is None else float(batch.global_rows)
    if rows > 0 and weight * size != total:
        loss = loss * (size * weight / total)
    with run.clock.phase("backward"):
        replica.last_gradient.at = 0.0
        loss.backward()  # type: ignore[no-untyped-call]
        if size > 1 and replica.last_gradient.at > 0:
            run.clock.split("all_reduce", replica.last_gradient.at)
    replica.check_gradients()
    if run.gradients is not None:
        run.gradients.accumulate(replica.plan.boundary)
    if counted is not None:
        counted.count(value, weight, rows, batch)


def step(
    run: Run,
    replica: Replica,
    counted: Pass | None,
    batch: Batch | Any,
    targets: Any = None,
) -> Tensor:
    """Forward, backward, all-reduce, clipping, optimizer, scheduler.

    Returns:
        This replica's mean loss, detached, ``()``; zero when it had no rows.

    Raises:
        FloatingPointError: the loss is NaN or Inf; no weight has been changed.
        PeerFailure: a peer died.
    """
    bundle = batch if isinstance(batch, Batch) else None
    loss = forward_loss(run, replica, counted, batch, targets)
    rows = bundle.rows if bundle is not None else rows_of(batch)
    run.plane.check()  # a run that has failed meanwhile stays at the step before
    backward(run, replica, counted, loss, run.last_loss, bundle, rows)
    update(run, replica)
    if counted is not None:
        counted.settle()
    return loss.detach()


def finite(run: Run, loss: Tensor) -> float:
    """Return a loss as a number.

    Raises:
        ValueError: it is no scalar.
        FloatingPointError: it is NaN or Inf.
    """
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
        # In a region around several steps they would outlive their weights.
        torch.clear_autocast_cache()
        if state.scheduler is not None:
            with state.being_stepped():
                state.scheduler.step()
        state.optimizer.zero_grad(set_to_none=True)
