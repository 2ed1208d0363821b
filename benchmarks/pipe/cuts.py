"""Where to cut a chain of layers so that its stages compute about equally long."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipetransformer.testing.solvers import min_max_cuts

# One element that is read or written takes about as long as this many multiplications.
ELEMENT_COST = 8


def layer_costs(model: nn.Sequential, inputs: Tensor) -> list[int]:
    """Return each child's cost: multiplications, and elements of all outputs.

    Nothing is computed: a copy without data runs once.

    Args:
        model: The chain.
        inputs: Its input; only the shape counts.
    """
    ghost = copy.deepcopy(model).to("meta").eval()
    costs = [0] * len(ghost)

    def watch(module: nn.Module, child: int) -> None:
        def see(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    costs[child] += ELEMENT_COST * tensor.numel()
            if isinstance(module, nn.ConvTranspose2d):
                costs[child] += inputs[0].numel() * module.weight[0].numel()
            elif isinstance(module, (nn.Conv2d, nn.Linear)):
                assert isinstance(output, Tensor)
                costs[child] += output.numel() * module.weight[0].numel()

        module.register_forward_hook(see)

    for child, layer in enumerate(ghost):
        for module in layer.modules():
            if not list(module.children()):
                watch(module, child)
    with torch.no_grad():
        ghost(inputs.to("meta"))
    return costs


def balanced_cuts(model: nn.Sequential, inputs: Tensor, num_stages: int) -> list[int]:
    """Return the cuts whose costliest stage is cheapest.

    Args:
        model: The chain.
        inputs: Its input.
        num_stages: At most the number of layers.

    Raises:
        ValueError: more stages than layers.
    """
    found = min_max_cuts([1 + c for c in layer_costs(model, inputs)], num_stages)
    if found is None:
        raise ValueError(
            f"cuts: expected at most {len(model)} stages, got {num_stages}"
        )
    return found[1]


def stage_devices(kind: str, num_stages: int) -> list[torch.device]:
    """Return a device per stage, in turn over those there are."""
    if kind == "cpu":
        return [torch.device("cpu")] * num_stages
    count = torch.cuda.device_count()
    return [torch.device("cuda", stage % count) for stage in range(num_stages)]


def move_stages(
    model: nn.Sequential, cuts: Sequence[int], devices: Sequence[torch.device]
) -> None:
    """Move each stage's layers to its device."""
    layers = list(model)
    for (first, end), device in zip(itertools.pairwise(cuts), devices, strict=True):
        for layer in layers[first:end]:
            layer.to(device)
