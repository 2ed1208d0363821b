"""Whether the loss is a mean over rows, judged once, by twice the rows and by halves.

Each replica's loss is weighted by its rows. That adds up to the gradient of the whole
batch if the loss is a mean; with a sum it would depend on the number of replicas.
So it does with a mean over something else, such as tokens or weights of classes, as
long as no ``loss_weight`` counts that: a mean of rows is the mean of its halves.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.data.generators import GlobalGenerators
from pipetransformer.data.structures import rows_of, tensors_of
from pipetransformer.run.arguments import Loss, LossWeight
from pipetransformer.run.context import Run

_LOG = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of the value, more in dtypes that round more
_NOTHING = 1e-6  # what may be left where terms cancel


def judged_loss(run: Run, outputs: Any, targets: Any) -> Tensor:
    """Return the loss of a batch, which the run's first ones are judged by.

    One row has no halves: what it shows is judged once, and again with the first batch
    that has two.

    Raises:
        ValueError: the loss is another one with each row twice.
    """
    given = run.arguments
    if run.rows_judged >= 2 or run.rows_judged >= (rows := max(1, rows_of(outputs))):
        return given.loss(outputs, targets)
    value = checked_loss(given.loss, outputs, targets, given.loss_weight)
    run.rows_judged = rows
    return value


def checked_loss(
    loss: Loss, outputs: Any, targets: Any, weight: LossWeight | None = None
) -> Tensor:
    """Return the loss of a batch; call it with each row twice and with halves.

    Global random generators are left as the first call left them. The other ones have
    copies of a loss that is a module, with the same parameters, and outputs that are
    cut off from the graph. A loss that cannot be judged is not refused, but named in
    a warning: one that draws random numbers, one that fails with twice the rows, one
    whose outputs or targets hold tensors without the rows of the batch. So is one that
    is another mean than that of its halves, since it is a mean within a replica.

    Args:
        loss: Of the user.
        outputs: Of the model.
        targets: Of the batch.
        weight: How many the loss is a mean of; None: the rows.

    Raises:
        ValueError: the loss is another one with each row twice.
    """
    try:
        twin, *others = (_twin(loss) for _ in range(3))
    except Exception as error:  # whatever user's attributes do when copied
        _not_checked(f"it cannot be copied: {_named(error)}")
        return loss(outputs, targets)
    devices = {t.device for t in tensors_of((outputs, targets))}
    before = GlobalGenerators.now(devices)
    value = loss(outputs, targets)
    rows, after = rows_of(outputs), GlobalGenerators.now(devices)
    if not (
        isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
    ):
        return value  # nothing to train with, which the caller says
    if not math.isfinite(value.detach()):
        return value  # as above
    if not after.equals(before):
        _not_checked("it draws random numbers")
        return value
    if any(t.dim() > 0 and len(t) != rows for t in tensors_of((outputs, targets))):
        _not_checked(f"outputs or targets hold a tensor with other than {rows} rows")
        return value
    try:
        doubled = float(twin(_twice(outputs, rows), _twice(targets, rows)).detach())
        halved = _of_halves(others, outputs, targets, rows, weight)
    except Exception as error:  # whatever a user's loss raises
        _not_checked(f"it fails with each row twice or half of them: {_named(error)}")
        return value
    finally:
        after.restore()
    _compare(value.detach(), doubled, halved, rows, weight)
    return value


def _of_halves(
    losses: Sequence[Loss],
    outputs: Any,
    targets: Any,
    rows: int,
    weight: LossWeight | None,
) -> float:
    """Return the mean of the losses of both halves, each by a loss of its own."""
    total = weights = 0.0
    middle = rows // 2
    for loss, part in zip(losses, (slice(middle), slice(middle, rows)), strict=True):
        wanted = _part(targets, rows, part)
        count = len(range(rows)[part]) if weight is None else float(weight(wanted))
        if count:
            total += count * float(loss(_part(outputs, rows, part), wanted).detach())
            weights += count
    return total / weights


def _compare(
    value: Tensor, doubled: float, halved: float, rows: int, weight: LossWeight | None
) -> None:
    once = float(value)
    allowed = max(_TOLERANCE, 8 * torch.finfo(value.dtype).eps)

    def agrees(other: float) -> bool:
        return math.isclose(once, other, rel_tol=allowed, abs_tol=_NOTHING)

    if not agrees(halved) and agrees(doubled):
        _LOG.warning(
            "loss: expected a mean over %s, got %g for %d rows and %g from their "
            "halves; what is trained depends on the number of replicas, and what "
            "evaluate returns on Config.eval_microbatch_rows, unless loss_weight tells "
            "how many the loss is a mean of: with class weights w, "
            "loss_weight=lambda targets: w[targets].sum()",
            "rows" if weight is None else "what loss_weight counts",
            once,
            rows,
            halved,
        )
    if not agrees(doubled):
        raise ValueError(
            f"loss: expected a mean over rows, got {once:g} for {rows} rows and "
            f"{doubled:g} for the same rows twice; take reduction='mean', or "
            "Config(check_loss=False) if rows are meant to be compared"
        )


def _twin(loss: Loss) -> Loss:
    """Return a copy of a module, whose buffers and counters are its own."""
    if not isinstance(loss, nn.Module):
        return loss
    shared: dict[int, Any] = {id(p): p for p in loss.parameters()}
    return copy.deepcopy(loss, shared)


def _twice(value: Any, rows: int) -> Any:
    """Return a structure of the same kinds with each row twice."""
    return _with_rows(value, rows, lambda t: torch.cat([t, t]), lambda s: s * 2)


def _part(value: Any, rows: int, part: slice) -> Any:
    """Return a structure of the same kinds with some of the rows."""
    # A copy, since a loss may change it in place.
    return _with_rows(value, rows, lambda t: t[part].clone(), lambda s: s[part])


def _with_rows(
    value: Any,
    rows: int,
    tensors: Callable[[Tensor], Tensor],
    samples: Callable[[Any], Any],
) -> Any:
    """Return a structure of the same kinds with other rows, cut off from the graph.

    Args:
        value: The structure.
        rows: Its rows.
        tensors: Takes each tensor.
        samples: Takes each list or tuple of one entry per sample, such as a name.
    """
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value.detach()
        return tensors(value.detach().requires_grad_(value.requires_grad))
    if isinstance(value, Mapping):
        made = copy.copy(value)
        for key, part in value.items():
            one = _with_rows(part, rows, tensors, samples)
            made[key] = one  # type: ignore[index]  # a dict of sorts
        return made
    if isinstance(value, (tuple, list)):
        if len(value) == rows and not tensors_of(value):
            return samples(value)
        parts = [_with_rows(part, rows, tensors, samples) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _not_checked(why: str) -> None:
    _LOG.warning("loss: not checked to be a mean over rows: %s", why)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
