"""The loss of a forward, as a number that may still be on its way to the host."""

from __future__ import annotations

import math

from torch import Tensor

from pipetransformer.device import LaterNumber


class StepLoss:
    """The loss of one batch on this replica.

    On the host it is known at once. On a device whoever reads it waits for it, so the
    training loop of a lone replica does so a step later, when the device has long
    computed it.

    Args:
        loss: ``()``.
        step: Optimizer steps done before.
        rank: This process's.
        waits: Read it at once, on a device, too.

    Raises:
        FloatingPointError: it is known, and NaN or Inf.
    """

    def __init__(self, loss: Tensor, step: int, rank: int, *, waits: bool) -> None:
        self._later = LaterNumber(loss)
        self._step, self._rank = step, rank
        self._late = not (waits or self._later.is_known)
        if not self._late:
            self.read()

    @property
    def is_known(self) -> bool:
        """Whether reading it waits for nothing."""
        return self._later.is_known

    @property
    def value(self) -> float:
        """The loss, whatever it is."""
        return self._later.read()

    def read(self) -> float:
        """Return the loss.

        Raises:
            FloatingPointError: it is NaN or Inf.
        """
        value = self.value
        if not math.isfinite(value):
            changed = (
                ", read a step later: weights may have changed" if self._late else ""
            )
            raise FloatingPointError(
                f"loss: expected a finite value, got {value} at step {self._step} on "
                f"rank {self._rank}{changed}"
            )
        return value
