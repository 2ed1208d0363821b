"""What an optimizer takes, layer by layer, without a change to it or the weights."""

from __future__ import annotations

import collections
import copy
import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LOG = logging.getLogger(__name__)

_REPEATS = 3


class OptimizerCost(NamedTuple):
    """What an optimizer takes for the parameters of a layer that train.

    Attributes:
        step_ns: A step, in nanoseconds; 0: not timed.
        state_bytes: Its state, but for single numbers; None: the copy did not step, as
            without memory for it.
    """

    step_ns: int
    state_bytes: int | None


def optimizer_costs(
    layers: nn.Sequential,
    optimizer: Optimizer,
    *,
    device: torch.device | None = None,
) -> list[OptimizerCost]:
    """Return what the optimizer takes for the parameters of each layer that train.

    A copy of the optimizer steps over copies of the parameters, with gradients of
    zeros and a state of its own; what it does once for all parameters is shared out
    among the layers. A parameter of several layers counts in the first.

    Args:
        layers: the model.
        optimizer: of its parameters; others of it do not count.
        device: where the copies are, and then steps are not timed: they are queued
            there, and one for all layers is no sum of those of each. None: where the
            parameters are.

    Returns:
        One entry per layer; zeros where nothing trains.
    """
    costs: list[OptimizerCost] = []
    known: dict[Hashable, OptimizerCost] = {}
    counted: set[int] = set()
    for layer in layers:
        own = {id(p): p for p in layer.parameters() if id(p) not in counted}
        counted.update(own)
        groups = [
            {**group, "params": [p for p in group["params"] if id(p) in own]}
            for group in optimizer.param_groups
        ]
        key = tuple(
            (number, tuple(p.shape), p.dtype, p.device)
            for number, group in enumerate(groups)
            for p in group["params"]
        )
        if key not in known:
            found = _cost(optimizer, groups, device) if key else OptimizerCost(0, 0)
            known[key] = found
        costs.append(known[key])
    return costs


def _cost(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]],
    device: torch.device | None,
) -> OptimizerCost:
    copied = copy.copy(optimizer)
    copied.state = collections.defaultdict(dict)
    try:
        copied.param_groups = [
            {**group, "params": [_like(p, device) for p in group["params"]]}
            for group in groups
            if group["params"]
        ]
        copied.step()  # makes its state
    except Exception as error:  # whatever it is: this is no more than an estimate
        kind = type(optimizer).__name__
        _LOG.info("what %s takes for a layer is not measured: %s", kind, error)
        return OptimizerCost(0, None)
    state = sum(t.nbytes for kept in copied.state.values() for t in _tensors(kept))
    spent = []
    for _ in range(_REPEATS if device is None else 0):
        start = time.perf_counter_ns()
        copied.step()
        spent.append(time.perf_counter_ns() - start)
    return OptimizerCost(min(spent, default=0), state)


def _tensors(state: dict[str, Any]) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, Tensor) and value.dim() > 0:  # no count of steps
            yield value


def _like(parameter: Tensor, device: torch.device | None) -> nn.Parameter:
    copied = nn.Parameter(torch.zeros_like(parameter, device=device))
    copied.grad = torch.zeros_like(copied)
    return copied
