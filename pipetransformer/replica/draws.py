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


def position_of_evaluation(step: int, first_microbatch: int) -> DrawPosition:
    """Return keys that no training step has.

    Args:
        step: Optimizer steps that are done.
        first_microbatch: Of the evaluation set, in the order of its samples.
    """
    return DrawPosition(-1 - step, first_microbatch)
