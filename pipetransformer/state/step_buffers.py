"""The model's buffers as they were before the step that is being computed.

A forward changes running statistics at once, long before the optimizer steps. A
checkpoint that is written in between holds the weights before the step, and must hold
the buffers that go with them: the step will be done again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class StepBuffers:
    """Copies of the buffers, taken by the first forward of each optimizer step.

    Args:
        model: The whole model, whose buffers are copied.
        step: Gives the number of optimizer steps done.
    """

    def __init__(self, model: nn.Module, step: Callable[[], int]) -> None:
        self._model = model
        self._step = step
        self._taken_at = -1
        self._copies: dict[str, Tensor] = {}

    def watch(self, module: nn.Module) -> None:
        """Take the copies before `module` runs; DDP has sent the buffers by then."""
        if any(True for _ in self._model.buffers()):
            module.register_forward_pre_hook(self._before_forward)

    def before_step(self) -> dict[str, Tensor] | None:
        """Return the copies by name, or None if no step is half done."""
        return self._copies if self._taken_at == self._step() else None

    def _before_forward(self, *_: object) -> None:
        if self._taken_at == self._step():
            return  # a second forward of the same step
        present = dict(self._model.named_buffers(remove_duplicate=False))
        for name, buffer in present.items():
            copy = self._copies.get(name)
            kind = buffer.shape, buffer.device
            if copy is None or (copy.shape, copy.device) != kind:
                self._copies[name] = torch.empty_like(buffer)
        torch._foreach_copy_(
            [self._copies[name] for name in present], list(present.values())
        )
        self._taken_at = self._step()
