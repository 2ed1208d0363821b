"""What the rest of a run takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """Of the passes behind one that has ended.

    Attributes:
        epoch: That has ended.
        step_seconds: Of an optimizer step in each pass to come.
        steps: Optimizer steps of a pass.
    """

    epoch: int
    step_seconds: tuple[float, ...]
    steps: int

    def seconds_left(self, step: int) -> float:
        """Return what is left of the run.

        Args:
            step: Optimizer steps done.
        """
        left = 0.0
        for number, each in enumerate(self.step_seconds, start=self.epoch + 1):
            begin = number * self.steps
            left += each * max(0, self.steps - max(0, step - begin))
        return left
