"""One training step on an active rank: forward, scaled loss, backward, update."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.autodp import PeerFailure
from pipetransformer.core.devices import device_of
from pipetransformer.data import Batch
from pipetransformer.data.structures import num_rows
from pipetransformer.device import bring
from pipetransformer.loop.accumulation import Accumulated, Window
from pipetransformer.loop.loss_check import judged_loss
from pipetransformer.loop.microbatch_loss import MicrobatchLoss, zero_of
from pipetransformer.progress.counts import Pass
from pipetransformer.replica.replica import Replica
from pipetransformer.report import StepRecord
from pipetransformer.run.context import Run
from pipetransformer.run.step_loss import StepLoss

_LOG = logging.getLogger(__name__)


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
        FloatingPointError: the loss is NaN or Inf; of a lone replica on a device,
            that of the step before.
        PeerFailure: a peer died.
    """
    bundle = batch if isinstance(batch, Batch) else None
    model = replica.trained
    if model is None:
        raise RuntimeError("forward of a replica that was retired; please report")
    _catch_up(run, counted)
    run.tell_step()
    if counted is not None:
        counted.begin_step()
    wanted = bundle.targets if bundle is not None else targets
    rows = _rows(batch)
    empty = rows == 0
    with run.clock.phase("forward"), run.precision.autocast():
        if replica.takes_loss and not empty:
            each = MicrobatchLoss(run, wanted, rows)
            loss: Tensor = model(batch, wanted, each)
            loss = loss / each.scale if each.scale != 1.0 else loss
        else:
            outputs = model(batch)
            loss = outputs if empty else _loss_of(run, outputs, wanted)
        began = time.perf_counter()
        on_device = isinstance(loss, Tensor) and not loss.is_cpu
        if on_device:
            run.times.mark("forward", loss.device)
        run.last_loss, run.own_loss = step_loss(run, replica, loss), None
        if on_device and run.last_loss.is_known:
            _divide_wait(run, began)
    return loss


def _divide_wait(run: Run, began: float) -> None:
    """Charge the wait for a loss to what the device did in the meantime."""
    parts = run.times.parts("forward", began, time.perf_counter())
    run.clock.divide(began, parts)


def _rows(batch: Batch | Any) -> int:
    """Return the rows of a batch of the engine, or of bare inputs.

    Raises:
        ValueError: bare inputs without a tensor that has rows.
    """
    if isinstance(batch, Batch):
        return batch.rows
    rows = num_rows(batch)
    if rows is None:
        raise ValueError(
            "inputs: expected a tensor with one row per sample, got none in a "
            f"{type(batch).__name__}"
        )
    return rows


def _catch_up(run: Run, counted: Pass | None) -> None:
    """Read the losses before, where they are on a device yet."""
    last = run.last_loss  # which a loop of the user's own may not have counted
    late = last is not None and not last.is_known
    if late or (counted is not None and counted.is_behind):
        with run.clock.phase("forward"):
            began = time.perf_counter()
            if last is not None:
                last.read()
            if late:
                _divide_wait(run, began)
            if counted is not None:
                counted.catch_up()


def weight_of(run: Run, targets: Any, rows: int) -> float:
    """Return how many a loss is the mean of: the rows, or what the user counts."""
    count = run.arguments.loss_weight
    return rows if count is None else float(count(targets))


def _loss_of(run: Run, outputs: Any, targets: Any) -> Tensor:
    place = device_of(outputs)
    targets = targets if place is None else bring(targets, place)
    if run.arguments.loss_weight is not None and weight_of(run, targets, 1) == 0:
        return zero_of(outputs)
    return judged_loss(run, outputs, targets)


def backward(
    run: Run,
    replica: Replica,
    counted: Pass | None,
    loss: Tensor,
    value: StepLoss,
    batch: Batch | None,
    rows: int,
    accumulated: Accumulated | None = None,
    *,
    share: Batch | None = None,
) -> None:
    """Run backward with the loss weighted by rows, and count the batch.

    DDP averages over the replicas; the mean over all rows of the batch is that average
    of ``loss * R * rows / global_rows``. Where the user counts something else, such
    as tokens, the replicas add that up first. Batches that share a step are weighted
    as one; of how many tokens they are is known with the last one, which then divides.

    Args:
        run: The run.
        replica: What this rank drives.
        counted: The pass that the step belongs to; None outside of one.
        loss: Of this replica's rows.
        value: The same as a number.
        batch: None where the rows are not those of the engine.
        rows: How many.
        accumulated: With batches that share a step: what the gradients hold.
        share: With bare inputs: the batch that they are made of, whose rows weigh
            them. No replica asks the others then, of which one may have none and step
            on the batch itself. None: they are of no pass, and all replicas are asked.
    """
    size, weight = replica.group.size, float(rows)
    counts = run.arguments.loss_weight is not None
    window = accumulated.window if accumulated is not None else None
    ends = window is None or batch is None or window.ends_with(batch.index)
    if counts:
        if batch is None:
            raise ValueError(
                "loss_weight: expected batches of engine.batches, got bare inputs"
            )
        weight = weight_of(run, batch.targets, rows) if rows else 0.0
    if accumulated is not None and window is not None:
        accumulated.weight += weight
        total = float(window.rows)
    elif batch is None and share is not None:
        weight, total = float(share.rows), float(share.global_rows)
    elif counts or batch is None:
        total = _over_replicas(replica, weight)
    else:
        total = float(batch.global_rows)
    if weight * size != total:
        loss = loss * (size * weight / total)
    with run.clock.phase("backward"):
        replica.last_gradient.at = 0.0
        run.precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
        run.times.mark("backward")
        if ends and size > 1:
            on_devices = replica.await_reduction()
            # There its time is when the last gradient was queued, not when it came.
            if replica.last_gradient.at > 0 and not on_devices:
                run.clock.split("all_reduce", replica.last_gradient.at)
    replica.check_gradients()
    if ends:
        if accumulated is not None and window is not None and counts:
            every = _over_replicas(replica, accumulated.weight)
            _multiply_gradients(replica, window.rows / every if every else 0.0)
        if run.state.scaler is None:  # else they are still scaled
            _observe(run, replica)
    if counted is not None:
        counted.count(value, weight, rows, batch, ends=ends)
    else:
        value.read()  # no pass does it later


def _over_replicas(replica: Replica, value: float) -> float:
    """Return the sum of all replicas' values; collective."""
    if replica.group.size == 1:
        return value
    part = torch.tensor([value], dtype=torch.float64)
    return float(replica.group.all_reduce_(part))


def _gradients(replica: Replica) -> list[Tensor]:
    parameters = replica.active_model.parameters()
    return [p.grad for p in parameters if p.grad is not None]


def _multiply_gradients(replica: Replica, factor: float) -> None:
    torch._foreach_mul_(_gradients(replica), factor)


def _observe(run: Run, replica: Replica) -> None:
    """Show the freeze policy the gradients of a step: reduced, not yet clipped."""
    if run.gradients is not None:
        with run.clock.phase("signals"):
            run.gradients.accumulate(replica.plan.boundary)


def step(
    run: Run,
    replica: Replica,
    counted: Pass | None,
    batch: Batch | Any,
    targets: Any = None,
    accumulated: Accumulated | None = None,
    *,
    share: Batch | None = None,
) -> Tensor:
    """Forward, backward, all-reduce, clipping, optimizer, scheduler.

    Args:
        run: The run.
        replica: What this rank drives.
        counted: The pass that the step belongs to; None outside of one.
        batch: A batch of the engine, or bare inputs.
        targets: With bare inputs: their targets.
        accumulated: With batches that share a step: what the gradients hold of those
            before this one, the last.
        share: With bare inputs: the batch that they are made of, if any.

    Returns:
        This replica's mean loss, detached, ``()``; zero when it had no rows.

    Raises:
        FloatingPointError: the loss is NaN or Inf; no weight has been changed. Of a
            lone replica on a device: that of the step before, which has changed some.
        PeerFailure: a peer died.
    """
    bundle = batch if isinstance(batch, Batch) else None
    try:
        loss = forward_loss(run, replica, counted, batch, targets)
        rows = _rows(batch)
        run.plane.check()  # a run that has failed meanwhile stays at the step before
        value, held = _last(run), accumulated
        backward(run, replica, counted, loss, value, bundle, rows, held, share=share)
        update(run, replica)
    except PeerFailure:
        raise  # if it is survived, the plan after it begins with none
    except BaseException:
        _leave(run, accumulated)
        raise
    if accumulated is not None:
        accumulated.end()
    if counted is not None:
        counted.settle()
    return loss.detach()


def accumulate(
    run: Run,
    replica: Replica,
    counted: Pass | None,
    batch: Batch,
    accumulated: Accumulated,
) -> Tensor:
    """Forward and backward of a batch that shares its step with later ones.

    Its gradients stay on this replica.

    Returns:
        This replica's mean loss, detached, ``()``; zero when it had no rows.

    Raises:
        FloatingPointError: the loss is NaN or Inf; no weight has been changed. Of a
            lone replica on a device: that of the step before, which has changed some.
        PeerFailure: a peer died.
    """
    try:
        with replica.without_reduction():
            loss = forward_loss(run, replica, counted, batch)
            value, rows = _last(run), batch.rows
            backward(run, replica, counted, loss, value, batch, rows, accumulated)
    except PeerFailure:
        raise
    except BaseException:
        _leave(run, accumulated)
        raise
    return loss.detach()


def _leave(run: Run, accumulated: Accumulated | None) -> None:
    """Leave no gradients of a batch that has failed to the next one.

    A script may catch the error, of want of memory, say, and leave the batch out. Those
    of batches before it that share its step are gone, too, which cannot be told apart.
    """
    if run.state.optimizer is not None:
        _clear_gradients(run, run.state.optimizer)
    if accumulated is None or accumulated.window is None:
        return
    accumulated.weight = 0.0
    before = accumulated.following - 1 - accumulated.window.first
    if before > 0:
        _LOG.warning(
            "a batch has failed: unless its step is taken again, it is one without the "
            "%d before it, whose gradients are dropped",
            before,
        )


def _clear_gradients(run: Run, optimizer: Optimizer) -> None:
    """Clear the gradients of all that trains, in the optimizer's groups or not."""
    optimizer.zero_grad(set_to_none=True)
    for parameter in run.arguments.left_out:
        parameter.grad = None


def begin_window(
    run: Run, accumulated: Accumulated, window: Window, plan_epoch: int
) -> None:
    """Clear the gradients for the batches of a step, unless they are under way."""
    if accumulated.continues(window, plan_epoch):
        return
    if run.state.optimizer is None:
        raise RuntimeError("step without an optimizer; please report")
    _clear_gradients(run, run.state.optimizer)
    accumulated.begin(window, plan_epoch)


def step_loss(run: Run, replica: Replica, loss: Tensor) -> StepLoss:
    """Return a loss as a number, for which a lone replica on a device does not wait.

    Others do: a loss that is NaN must not reach their gradients.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is no scalar.
        FloatingPointError: it is known, and NaN or Inf.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss: expected a scalar tensor to call backward on, got "
            f"{type(loss).__name__}"
        )
    if loss.dim() != 0:
        raise ValueError(
            f"loss: expected a scalar mean over rows, got shape {tuple(loss.shape)}"
        )
    waits = replica.group.size > 1
    return StepLoss(loss, run.state.step, run.info.rank, waits=waits)


def _last(run: Run) -> StepLoss:
    if run.last_loss is None:
        raise RuntimeError("loss of no forward; please report")
    return run.last_loss


def update(run: Run, replica: Replica) -> None:
    """Clip, step optimizer and scheduler, clear gradients.

    Raises:
        RuntimeError: backward has left out parameters, so nothing was reduced.
        FloatingPointError: gradients that were clipped on the host are NaN; no weight
            has been changed.
    """
    state, config = run.state, run.config
    if state.optimizer is None:
        raise RuntimeError("step without an optimizer; please report")
    replica.check_reduced()
    with run.clock.phase("optimizer"):
        if state.scaler is not None:
            run.read_loss()  # it waits anyway
            state.scaler.unscale_(state.optimizer)
            if bool(nn.utils.get_total_norm(_gradients(replica)).isfinite()):
                _observe(run, replica)
        if config.clip_grad_norm is not None:
            active = [p for p in replica.active_model.parameters() if p.requires_grad]
            norm = nn.utils.clip_grad_norm_(active, config.clip_grad_norm)
            if norm.is_cpu and state.scaler is None:  # else reading it is a wait
                _refuse_nan(run, replica, norm)
        stepped = state.take_step()
        # In a region around several steps they would outlive their weights.
        torch.clear_autocast_cache()
        each_step = config.scheduler_interval == "step"
        if stepped and each_step and state.scheduler is not None:
            with state.being_stepped():
                state.scheduler.step()
        _clear_gradients(run, state.optimizer)
        run.times.mark("optimizer")
    if run.arguments.listeners and run.is_lead:
        run.tell_step()  # of a loop whose forward is not the engine's
        last = run.last_loss if run.own_loss is None else run.own_loss
        run.untold = _record_of(run), last
        if last is None or last.is_known:
            run.tell_step()


def _refuse_nan(run: Run, replica: Replica, norm: Tensor) -> None:
    """Refuse clipped gradients with NaN; a norm that overflowed has made them zero."""
    if math.isfinite(norm.item()):
        return
    if any(bool(gradient.isnan().any()) for gradient in _gradients(replica)):
        if run.state.optimizer is not None:
            _clear_gradients(run, run.state.optimizer)
        raise FloatingPointError(
            f"gradients: expected finite values, got a norm of {norm.item()} at step "
            f"{run.state.step} on rank {run.info.rank}"
        )


def _record_of(run: Run) -> StepRecord:
    state, workload = run.state, run.inputs.workload
    if state.optimizer is None:
        raise RuntimeError("step without an optimizer; please report")
    each = run.config.accumulation_steps
    total = None
    if workload is not None and run.total_epochs:
        total = run.total_epochs * -(-workload.num_batches // each)
    forecast = run.forecast
    return StepRecord(
        step=state.step,
        total_steps=total,
        epoch=state.epoch,
        loss=0.0,  # once it is known
        learning_rate=state.learning_rate,
        seconds_left=None if forecast is None else forecast.seconds_left(state.step),
    )
