"""Times an optimizer's step, layer by layer, without a change to it or the weights."""

from __future__ import annotations

import collections
import copy
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_REPEATS = 3


def time_optimizer(layers: nn.Sequential, optimizer: Optimizer) -> list[int]:
    """Return the nanoseconds of a step for the parameters of each layer that train.

    A copy of the optimizer steps over copies of the parameters, with gradients of
    zeros and a state of its own; what it does once for all parameters is shared out
    among the layers. A parameter of several layers counts in the first.

    Args:
        layers: the model.
        optimizer: of its parameters; others of it do not count.

    Returns:
        One entry per layer; 0 where nothing trains.
    """
    times: list[int] = []
    known: dict[Hashable, int] = {}
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
            known[key] = _time(optimizer, groups) if key else 0
        times.append(known[key])
    return times


def _time(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> int:
    copied = copy.copy(optimizer)
    copied.state = collections.defaultdict(dict)
    copied.param_groups = [
        {**group, "params": [_like(p) for p in group["params"]]}
        for group in groups
        if group["params"]
    ]
    copied.step()  # makes its state
    spent = []
    for _ in range(_REPEATS):
        start = time.perf_counter_ns()
        copied.step()
        spent.append(time.perf_counter_ns() - start)
    return min(spent)


def _like(parameter: Tensor) -> nn.Parameter:
    copied = nn.Parameter(torch.zeros_like(parameter))
    copied.grad = torch.zeros_like(parameter)
    return copied
