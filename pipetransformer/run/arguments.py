"""What a run is made from: what the user passed, and the training set of its plans."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from pipetransformer.autocache import Ragged
from pipetransformer.autofreeze import Policy
from pipetransformer.config import Config
from pipetransformer.data.division import Division, NamedParts
from pipetransformer.report import Listeners
from pipetransformer.state.registered import Registered
from pipetransformer.state.state import OptimizerFactory, SchedulerFactory

Loss = Callable[[Any, Any], Tensor]
LossWeight = Callable[[Any], Any]


@runtime_checkable
class AdaptedModel(NamedParts, Protocol):
    """A model with its layers and what the engine needs to know of them.

    `pipetransformer.adapters.from_transformers` makes them.
    """

    @property
    def sequential(self) -> nn.Sequential:
        """The layers."""

    @property
    def units(self) -> Sequence[int]:
        """Element index after each freeze unit."""

    @property
    def loss_weight(self) -> LossWeight | None:
        """How many the model's own loss is the mean of; None: the rows."""

    @property
    def ragged(self) -> Ragged | None:
        """How rows of different lengths are padded; None: all have one shape."""

    def loss(self, outputs: Any, targets: Any, /) -> Tensor:
        """Return the model's own loss, a 0-dim mean."""

    def export(self, folder: str | os.PathLike[str], /, *, merge: bool = False) -> None:
        """Write this process's weights as the model's own library reads them.

        With `merge` those of PEFT adapters are added to the weights they belong to.
        """


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
        adapted: The model that the layers are made from; None: a plain Sequential.
        ragged: How rows of different lengths are padded; None: all have one shape.
        listeners: What the user wants to be told.
        registered: What else of the user's goes with the training state.
        left_out: Trainable parameters that the optimizer does not have.
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
    adapted: AdaptedModel | None = None
    ragged: Ragged | None = None
    listeners: Listeners = dataclasses.field(default_factory=Listeners)
    registered: Registered = dataclasses.field(default_factory=Registered)
    left_out: Sequence[nn.Parameter] = ()

    @property
    def untrained(self) -> frozenset[nn.Parameter]:
        """Return the parameters that the user froze."""
        return frozenset(self.model.parameters()) - frozenset(self.parameters)

    @property
    def division(self) -> Division:
        """Return how collated batches are divided into inputs and targets."""
        return Division(self.adapted)


@dataclasses.dataclass(frozen=True)
class Workload:
    """The training set and batch that plans are made for.

    Attributes:
        num_samples: Samples of the training set.
        global_batch: Samples of a batch over all replicas.
        num_batches: Batches of a pass.
        drop_last: Whether a short last batch is left out.
        sample: Gives collated inputs of n rows, as large as in typical batches.
        hashes: The cache hashes inputs; else the dataset names them.
        weights: Hash of the weights that samples are drawn by; empty: there are none.
    """

    num_samples: int
    global_batch: int
    num_batches: int
    drop_last: bool
    sample: Callable[[int], Any]
    hashes: bool = True
    weights: str = ""

    def batches_per_step(self, accumulation_steps: int) -> float:
        """Return how many batches share an optimizer step, in the mean of a pass.

        Args:
            accumulation_steps: Batches for each step; the last one has the rest.
        """
        steps = -(-self.num_batches // accumulation_steps)
        return self.num_batches / steps if steps else float(accumulation_steps)

    def describe(self) -> dict[str, int | bool | str]:
        """Return what decides which samples form a batch."""
        return {
            "num_samples": self.num_samples,
            "batch_size": self.global_batch,
            "drop_last": self.drop_last,
            **({"weights": self.weights} if self.weights else {}),
        }
