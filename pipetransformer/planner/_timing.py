"""Times one layer: forward, the two halves of its backward, forward alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipetransformer.planner._alike import cost_key
from pipetransformer.planner._flow import Flow, call, timed_call
from pipetransformer.planner._stopwatch import Stopwatch, stopwatch

Place: TypeAlias = Callable[[nn.Module], AbstractContextManager[None]]


def left(_: nn.Module) -> AbstractContextManager[None]:
    """Leave a layer where it is."""
    return nullcontext()


class LayerTimes(NamedTuple):
    """Nanoseconds of one layer for one micro-batch."""

    forward_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    forward_only_ns: int


def time_layers(
    layers: nn.Sequential, value: object, repeats: int, *, place: Place = left
) -> list[LayerTimes]:
    """Time every layer on the output of the one before, and on the skips it pops.

    Layers that do the same work are timed once, and have equal times: a stack of
    blocks is measured fast, and noise does not tell its blocks apart.

    Args:
        layers: the model.
        value: inputs of the first layer.
        repeats: timed runs per layer, after one that warms up; the fastest counts.
        place: brings each layer to where it is measured, and back.

    Returns:
        One entry per layer.
    """
    times = []
    known: dict[Hashable, LayerTimes] = {}
    flow = Flow(value, spreads=True)
    for layer in layers:
        taken = flow.at(layer)
        with place(layer):
            key = cost_key(layer, taken)
            if key in known:
                times.append(known[key])
                flow = flow.after(layer, _given(layer, taken))
                continue
            runs = []
            for _ in range(repeats + 1):
                run, given = _run_once(layer, taken)
                runs.append(run)
        columns = zip(*runs[1:], strict=True)
        forward_ns, input_ns, both_ns, only_ns = (min(column) for column in columns)
        trains = any(p.requires_grad for p in layer.parameters())
        weight_ns = max(0, both_ns - input_ns) if trains else 0
        times.append(LayerTimes(forward_ns, input_ns, weight_ns, only_ns))
        known[key] = times[-1]
        flow = flow.after(layer, given)
    return times


def _given(layer: nn.Module, taken: Flow) -> Flow:
    with torch.no_grad():
        return call(layer, taken.map(torch.clone))


def _run_once(layer: nn.Module, taken: Flow) -> tuple[tuple[int, int, int, int], Flow]:
    """Forward, input, full backward and forward-only times, and what it gave."""
    watch = stopwatch(next(taken.tensors()).device)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    # Each backward follows a forward of its own: the second one over the same
    # graph would find its operands in the processor's caches.
    first_ns, input_ns, _ = _forward_backward(watch, layer, taken, [])
    second_ns, both_ns, given = _forward_backward(watch, layer, taken, parameters)
    only_ns = _forward_only_ns(watch, layer, taken)
    return (min(first_ns, second_ns), input_ns, both_ns, only_ns), given


def _forward_backward(
    watch: Stopwatch, layer: nn.Module, taken: Flow, parameters: Sequence[Tensor]
) -> tuple[int, int, Flow]:
    """Time a forward, and its backward to the inputs and ``parameters``.

    Skips that the layer pops are inputs like others, those that it stashes outputs.

    The gradients of the parameters are added to others, as in a step those of every
    micro-batch but the first: of small micro-batches that is a good part of the cost.
    """
    leaves: list[Tensor] = []
    # Written to, so that their memory is there before the clock runs.
    sums = [torch.empty_like(p).zero_() for p in parameters]

    def as_input(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.clone()
        leaves.append(tensor.requires_grad_())
        return tensor.clone()  # a layer may work in place, but not on a leaf

    with torch.enable_grad():
        forward_ns, given = timed_call(watch, layer, taken.map(as_input))
        backward_ns = timed_backward(watch, given, leaves, parameters, sums)
    return forward_ns, backward_ns, given.map(lambda t: t.detach())


def timed_backward(
    watch: Stopwatch,
    given: Flow,
    leaves: Sequence[Tensor],
    parameters: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> int:
    """Time the backward of what was given, to inputs and parameters.

    Args:
        watch: the stopwatch.
        given: outputs.
        leaves: inputs that want a gradient.
        parameters: those that do.
        sums: what the parameters' gradients are added to.
    """
    outputs = [t for t in given.tensors() if t.requires_grad]
    targets = [*leaves, *parameters]
    if not outputs or not targets:
        return 0
    gradients = [torch.ones_like(t) for t in outputs]

    def backward() -> None:
        found = torch.autograd.grad(outputs, targets, gradients, allow_unused=True)
        with torch.no_grad():
            for total, gradient in zip(sums, found[len(leaves) :], strict=True):
                if gradient is not None:
                    total.add_(gradient)

    return watch(backward)[0]


def _forward_only_ns(watch: Stopwatch, layer: nn.Module, taken: Flow) -> int:
    """Time the layer as it runs when frozen: no gradients, eval mode."""
    copied = taken.map(lambda t: t.detach().clone())
    with evaluating(layer), torch.no_grad():
        return timed_call(watch, layer, copied)[0]


@contextmanager
def evaluating(layers: nn.Module) -> Iterator[None]:
    """Hold modules in eval mode, and put each one's mode back."""
    modes = {module: module.training for module in layers.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
