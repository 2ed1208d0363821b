"""Mixed precision: the region that a step computes in, and the scale of its loss."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from pipetransformer.config import AmpMode

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What `Config.amp` asks for.

    Args:
        amp: Of the configuration.
        device_type: That the model computes on.

    Attributes:
        scaler: Scales the loss so that small fp16 gradients do not become zero; None
            in bf16, which has the range of fp32, and without mixed precision.
    """

    def __init__(self, amp: AmpMode | None, device_type: str) -> None:
        self._dtype = _DTYPES[amp] if amp is not None else None
        self._device_type = device_type
        self.scaler = torch.amp.GradScaler(device_type) if amp == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the region for a forward and its loss; the weights stay as they are.

        Without `Config.amp` a region of the caller's own goes on.
        """
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self._dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that backward runs from."""
        if self.scaler is None:
            return loss
        scaled: Tensor = self.scaler.scale(loss)
        return scaled
