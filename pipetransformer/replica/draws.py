"""Keys of the engine's random draws; nothing of it touches a global generator."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DrawPosition:
    """Keys of the random draws of one forward call, alongside the seed and the layer.

    Attributes:
        step: Optimizer step.
        first_microbatch: Number of the call's first micro-batch, counted over all
            replicas.
    """

    step: int
    first_microbatch: int

    def again(self, times: int) -> DrawPosition:
        """Return keys of their own for a call that was made `times` times before.

        Two forwards of one batch in one step are to differ, as they do without an
        engine: losses that compare them live from that.
        """
        if times == 0:
            return self
        return dataclasses.replace(
            self, first_microbatch=self.first_microbatch + times * _MOST_MICROBATCHES
        )


_MOST_MICROBATCHES = 1 << 40  # of a step, over all replicas: far fewer


def position_of_evaluation(step: int, first_microbatch: int) -> DrawPosition:
    """Return keys that no training step has.

    Args:
        step: Optimizer steps that are done.
        first_microbatch: Of the evaluation set, in the order of its samples.
    """
    return DrawPosition(-1 - step, first_microbatch)
