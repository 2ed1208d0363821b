"""What a run is made from: what the user passed, and the training set of its plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pipetransformer.autofreeze import Policy
from pipetransformer.config import Config
from pipetransformer.state.state import OptimizerFactory, SchedulerFactory

Loss = Callable[[Any, Any], Tensor]
LossWeight = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """What the user passed to the engine, validated.

    Attributes:
        model: The Sequential, on the host.
        optimizer: Optimizer factory; gets the trainable parameters in model order.
        lr_scheduler: Scheduler factory or None.
        loss: ``loss(outputs, targets)`` -> scalar mean over rows.
        loss_weight: ``loss_weight(targets)`` -> how many the loss is the mean of; None:
            the rows.
        policy: The freeze policy, bound to the number of units.
        unit_ends: Element index after each freeze unit.
        parameters: The trainable parameters in model order.
        config: The configuration.
    """

    model: nn.Sequential
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None
    loss: Loss
    loss_weight: LossWeight | None = None
    policy: Policy
    unit_ends: tuple[int, ...]
    parameters: Sequence[nn.Parameter]
    config: Config


@dataclasses.dataclass(frozen=True)
class Workload:
    """The training set and batch that plans are made for.

    Attributes:
        num_samples: Samples of the training set.
        global_batch: Samples of a batch over all replicas.
        num_batches: Batches of a pass.
        drop_last: Whether a short last batch is left out.
        sample: Gives collated inputs of the first n samples.
    """

    num_samples: int
    global_batch: int
    num_batches: int
    drop_last: bool
    sample: Callable[[int], Any]

    def describe(self) -> dict[str, int | bool]:
        """Return what decides which samples form a batch."""
        return {
            "num_samples": self.num_samples,
            "batch_size": self.global_batch,
            "drop_last": self.drop_last,
        }
