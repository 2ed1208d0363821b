"""Times a whole model, layer after layer as in a run, to correct times of lone layers.

A layer that is measured by itself, again and again, finds its weights and its memory
where the processor has them at hand, or its inputs where it has not. In a run the
other layers come between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipetransformer.planner._flow import Flow, call
from pipetransformer.planner._stopwatch import stopwatch
from pipetransformer.planner._timing import LayerTimes, evaluating, timed_backward

_MOST_SECONDS = 0.15  # until the last timed run begins; one is there in any case


class RowTimes(NamedTuple):
    """Nanoseconds of all layers for one micro-batch."""

    forward_ns: float
    backward_ns: float
    forward_only_ns: float


def time_in_a_row(layers: nn.Sequential, value: object, repeats: int) -> RowTimes:
    """Time forward, backward and forward without gradients over all layers.

    Args:
        layers: the model.
        value: inputs of the first layer.
        repeats: most timed runs, after one that warms up; their medians count.
    """
    parameters = [p for p in layers.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    run_in_a_row(layers, value, parameters, sums)  # finds no memory of its own
    began = time.perf_counter()
    runs: list[RowTimes] = []
    while len(runs) < repeats:
        both = run_in_a_row(layers, value, parameters, sums)
        runs.append(RowTimes(*both, _forward_only_ns(layers, value)))
        if time.perf_counter() - began > _MOST_SECONDS:
            break
    return RowTimes(*(statistics.median(c) for c in zip(*runs, strict=True)))


def scaled(
    sizes: Sequence[Sequence[LayerTimes]], whole: RowTimes
) -> list[list[LayerTimes]]:
    """Return layers' times, of all sizes alike, so that the last adds up to the whole.

    Args:
        sizes: for each micro-batch size the layers.
        whole: of the largest.
    """
    last = sizes[-1]
    forward = _share(whole.forward_ns, (t.forward_ns for t in last))
    backward = _share(
        whole.backward_ns, (t.input_grad_ns + t.weight_grad_ns for t in last)
    )
    only = _share(whole.forward_only_ns, (t.forward_only_ns for t in last))
    return [
        [
            LayerTimes(
                forward_ns=round(t.forward_ns * forward),
                input_grad_ns=round(t.input_grad_ns * backward),
                weight_grad_ns=round(t.weight_grad_ns * backward),
                forward_only_ns=round(t.forward_only_ns * only),
            )
            for t in times
        ]
        for times in sizes
    ]


def _share(whole: float, parts: Iterable[int]) -> float:
    total = sum(parts)
    return whole / total if whole > 0 and total > 0 else 1.0


def run_in_a_row(
    layers: nn.Sequential,
    value: object,
    parameters: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> tuple[float, float]:
    """Run forward and backward once; return the nanoseconds of each.

    Args:
        layers: the model.
        value: inputs of the first layer.
        parameters: those that want a gradient.
        sums: what their gradients are added to.
    """
    flow = Flow(value, spreads=True)
    watch = stopwatch(next(flow.tensors()).device)
    leaves: list[Tensor] = []

    def as_input(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.is_floating_point() or tensor.is_complex():
            leaves.append(tensor.requires_grad_())
        return tensor.clone()  # a layer may work in place, but not on a leaf

    with torch.enable_grad():
        taken = flow.map(as_input)
        forward_ns, last = watch(lambda: _through(layers, taken))
        assert isinstance(last, Flow)
        backward_ns = timed_backward(watch, last, leaves, parameters, sums)
    return forward_ns, backward_ns


def _forward_only_ns(layers: nn.Sequential, value: object) -> float:
    flow = Flow(value, spreads=True)
    watch = stopwatch(next(flow.tensors()).device)
    with torch.no_grad(), evaluating(layers):
        taken = flow.map(lambda t: t.detach().clone())
        return watch(lambda: _through(layers, taken))[0]


def _through(layers: nn.Sequential, flow: Flow) -> Flow:
    for layer in layers:
        flow = flow.after(layer, call(layer, flow.at(layer)))
    return flow
