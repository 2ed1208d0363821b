"""Sums gradients over an interval: what a policy's gradient term looks at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from pipetransformer import _C
from pipetransformer.autofreeze._ops import l1_norms, squared_norms

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class GradientAccumulator:
    """Adds up the gradients of the active units between two evaluation points.

    Holds one copy of the active gradients (float32 for half-precision ones) on their
    own devices and reads nothing back until ``norms``. Layers after the last unit
    (the head) are not counted. Not thread-safe.

    A unit in which nothing trains, such as an activation, has no gradient that could
    settle: it has the value of the active unit before it that trains, and without one
    that of the first one behind it.

    Args:
        layers: the whole model.
        unit_ends: layer index after each unit, from ``resolve_units``.
    """

    def __init__(self, layers: nn.Sequential, unit_ends: Sequence[int]) -> None:
        children = list(layers)
        starts = (0, *unit_ends)
        self._starts = starts[:-1]
        self._units = [
            list(nn.Sequential(*children[start:end]).parameters())
            for start, end in zip(starts, unit_ends, strict=False)
        ]
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._boundary = -1
        self._active: list[nn.Parameter] = []
        self._has: list[bool] = []  # of each active one: a gradient, in the last step
        self._targets: list[torch.Tensor] | None = None  # their sums

    def accumulate(self, boundary: int) -> None:
        """Add the present gradients of the layers from `boundary` on.

        Call it after the all-reduce and before clipping, once per optimizer step.
        Sums of layers below the boundary are dropped.
        """
        if boundary != self._boundary:
            self._begin_at(boundary)
        gradients = [parameter.grad for parameter in self._active]
        has = [gradient is not None for gradient in gradients]
        if self._targets is None or has != self._has:
            self._has = has
            with_gradient = itertools.compress(self._active, has)
            self._targets = [self._sum_of(parameter) for parameter in with_gradient]
        _C.autofreeze.add_each(
            self._targets, [each for each in gradients if each is not None]
        )

    def _begin_at(self, boundary: int) -> None:
        """Go over to the units from a layer on."""
        self._boundary, self._targets = boundary, None
        units = zip(self._starts, self._units, strict=True)
        active = dict.fromkeys(
            parameter
            for start, unit in units
            if start >= boundary
            for parameter in unit
        )
        for parameter in [p for p in self._sums if p not in active]:
            del self._sums[parameter]
        self._active = list(active)

    def norms(self, boundary: int = 0) -> tuple[float, ...]:
        """L2 norm per unit of the summed gradient, in fp64; 0.0 where there is none.

        Waits for the devices that hold the sums. Units below layer `boundary` are
        frozen.
        """
        squares = self._by_parameter(_squared_norms)
        return self._handed_on(
            boundary,
            [
                math.sqrt(math.fsum(squares.get(p, 0.0) for p in unit))
                for unit in self._units
            ],
        )

    def l1_norms(self, boundary: int = 0) -> tuple[float, ...]:
        """Per unit the sum of its parameters' L1 norms of the summed gradient, in fp64.

        0.0 where there is none. Waits for the devices that hold the sums. Units below
        layer `boundary` are frozen.
        """
        norms = self._by_parameter(_l1_norms)
        return self._handed_on(
            boundary,
            [math.fsum(norms.get(p, 0.0) for p in unit) for unit in self._units],
        )

    def _handed_on(self, boundary: int, values: list[float]) -> tuple[float, ...]:
        """Give active units in which nothing trains the value of one that does."""
        active = [u for u, start in enumerate(self._starts) if start >= boundary]
        trains = {u: any(p.requires_grad for p in self._units[u]) for u in active}
        last = next((unit for unit in active if trains[unit]), None)
        for unit in active:
            if trains[unit]:
                last = unit
            elif last is not None:
                values[unit] = values[last]
        return tuple(values)

    def follow(self) -> None:
        """Bring the sums to where their parameters are."""
        self._targets = None
        for parameter, total in self._sums.items():
            self._sums[parameter] = total.to(parameter.device)

    def reset(self) -> None:
        """Forget the sums, at an evaluation point after ``norms``."""
        self._targets = None
        self._sums.clear()

    def state_dict(self) -> dict[int, torch.Tensor]:
        """Return the sums, not copies, by the parameter's number among all units'."""
        return {
            number: self._sums[parameter]
            for number, parameter in enumerate(self._parameters())
            if parameter in self._sums
        }

    def load_state_dict(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Take over copies of another accumulator's sums, in place of its own.

        Raises:
            ValueError: a sum of no parameter, or of another shape.
        """
        parameters = self._parameters()
        self.reset()
        self._boundary = -1
        for number, value in sums.items():
            known = 0 <= number < len(parameters)
            shape = parameters[number].shape if known else None
            if shape != value.shape:
                raise ValueError(
                    f"gradient sum {number}: expected shape {shape}, got {value.shape}"
                )
            self._sum_of(parameters[number]).copy_(value)

    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for unit in self._units for p in unit))

    def _sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        found = self._sums.get(parameter)
        if found is None:
            dtype = parameter.dtype
            wide = torch.float32 if dtype in _LOW_PRECISION else dtype
            found = torch.zeros_like(parameter, dtype=wide, requires_grad=False)
            self._sums[parameter] = found
        return found

    def _by_parameter(
        self, reduce: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> dict[nn.Parameter, float]:
        """Reduce each sum to a number; one read-back per device."""
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for parameter, total in self._sums.items():
            by_device.setdefault(total.device, []).append(parameter)
        found: dict[nn.Parameter, float] = {}
        for parameters in by_device.values():
            values = reduce([self._sums[p] for p in parameters])
            found.update(zip(parameters, values.tolist(), strict=True))
        return found


def _squared_norms(sums: list[torch.Tensor]) -> torch.Tensor:
    """Return those of complex numbers by their parts: squares add up."""
    return squared_norms(
        [torch.view_as_real(each) if each.is_complex() else each for each in sums]
    )


def _l1_norms(sums: list[torch.Tensor]) -> torch.Tensor:
    """Return sums of absolute values, which complex numbers have, too."""
    return l1_norms([each.abs() if each.is_complex() else each for each in sums])
