"""Which batches share an optimizer step: `Config.accumulation_steps`.

Their gradients add up on each replica, and are reduced with the last of them. A plan
changes between optimizer steps only; where a rank is lost in between, the survivors
take the batches of the step again.
"""

from __future__ import annotations

import dataclasses

from pipetransformer.run.arguments import Workload


@dataclasses.dataclass(frozen=True)
class Window:
    """The batches of one optimizer step.

    Attributes:
        first: Number of the first one in the pass.
        end: Number of the first one of the next step.
        rows: Of all of them, over all replicas.
    """

    first: int
    end: int
    rows: int

    def ends_with(self, number: int) -> bool:
        """Tell whether the optimizer steps with batch `number`."""
        return number == self.end - 1


def window_of(number: int, *, done: int, steps: int, workload: Workload) -> Window:
    """Return the window of a batch.

    Args:
        number: Of the batch in the pass.
        done: Batches that optimizer steps are done with: a resumed pass may go on
            within what would have been one step.
        steps: Batches for each optimizer step; the last one of a pass has the rest.
        workload: What the pass is made of.
    """
    turn = number // steps
    first = min(max(turn * steps, done), number)
    end = min((turn + 1) * steps, workload.num_batches)
    size, total = workload.global_batch, workload.num_samples
    return Window(first, end, min(end * size, total) - first * size)


@dataclasses.dataclass
class Accumulated:
    """What this rank's gradients hold.

    Attributes:
        window: Whose beginning they are; None: of no window.
        plan_epoch: The plan that they were computed under.
        weight: Of how many tokens they are, or whatever the user counts.
        following: The batch that is to come next, as long as there is a window.
    """

    window: Window | None = None
    plan_epoch: int = -1
    weight: float = 0.0
    following: int = 0

    def follow(self, window: Window, number: int, first: int) -> None:
        """Go on to the next batch, and refuse one before which others were left out.

        Args:
            window: Of the batch.
            number: Of the batch in the pass.
            first: Of the first batch that this rank was given in the pass.

        Raises:
            ValueError: batches before it that it shares a step with, or that share one
                with what the gradients hold, have had no turn.
        """
        wanted = max(window.first if self.window is None else self.following, first)
        if number > wanted:
            raise ValueError(
                "Config.accumulation_steps: expected engine.step with each batch of an "
                f"optimizer step, got one with batch {number} where batch {wanted} is "
                "due"
            )
        before = 0 if self.window is None else self.following
        self.following = max(before, number + 1)

    def continues(self, window: Window, plan_epoch: int) -> bool:
        """Tell whether the gradients are the beginning of `window` under this plan."""
        return (self.window, self.plan_epoch) == (window, plan_epoch)

    def missing(self, window: Window, plan_epoch: int, number: int) -> range:
        """Return the batches before `number` that were computed under a lost plan."""
        return range(window.first if plan_epoch != self.plan_epoch else number, number)

    def begin(self, window: Window, plan_epoch: int) -> None:
        """Note that the gradients are cleared for a window."""
        self.window, self.plan_epoch, self.weight = window, plan_epoch, 0.0

    def end(self) -> None:
        """Note that the optimizer has stepped, or that the step was left."""
        self.window = None
