"""A small run whose plans are forced, so that two runs of it do the same.

Eight layers, float64, no dropout, an optimizer whose step can be cut in two. K is
forced and shrinks only with the layers that are left to train; M is forced; so no
plan depends on what a machine measured, and the weights after each step are the same
bits in every run of the same world size.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

import pipetransformer as pt

DEPTH = 6
WIDTH = 8
SAMPLES = 50
BATCH = 12
STEPS = 5  # of an epoch: 50 samples in batches of 12
FREEZE_EVERY = 4  # steps between two changes, where they are between batches
PREPARE_STEPS = 2  # where plans are prepared ahead
FREEZES = {2: (0, 6, 0), 3: (0, 5, 6, 0), 4: (0, 5, 6, 0)}


class Block(nn.Module):
    """A residual block; every row is computed on its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to `x`, ``(rows, width)``."""
        inner: Tensor = torch.tanh(self.up(self.norm(x)))
        outer: Tensor = self.down(inner)
        return x + outer


def small_model(depth: int = DEPTH, width: int = WIDTH) -> nn.Sequential:
    """Return [linear, block * depth, head], equal on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [Block(width) for _ in range(depth)]
        layers = [nn.Linear(4, width), *blocks, nn.Linear(width, 3)]
    return nn.Sequential(*layers).double()


class SmallSet(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random inputs of 4 numbers in 3 classes."""

    def __init__(self, size: int = SAMPLES, *, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        self.y = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def inputs(self, index: int) -> Tensor:
        """Return a sample's input."""
        return self.x[index]

    def targets(self, index: int) -> Tensor:
        """Return a sample's class."""
        return self.y[index]

    def input_key(self, index: int, epoch: int) -> int:
        """Return the sample's number: its input is the same in every epoch."""
        return index


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum, which tells when half of a step is done."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], halfway: Callable[[], None]
    ) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})
        self._halfway = halfway

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            wanted = [p for p in group["params"] if p.grad is not None]
            for number, parameter in enumerate(wanted):
                if number == len(wanted) // 2:
                    self._halfway()
                self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        if parameter.grad is not None:
            state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
        parameter.sub_(state["momentum"], alpha=group["lr"])


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Of the processes of a run, in seconds."""

    heartbeat: float = 2.0
    protocol: float = 5.0
    store: float = 20.0

    def config(self, **changes: Any) -> pt.AutoDPConfig:
        """Return them as the engine takes them."""
        return pt.AutoDPConfig(
            heartbeat_interval=timedelta(seconds=self.heartbeat / 10),
            heartbeat_timeout=timedelta(seconds=self.heartbeat),
            protocol_timeout=timedelta(seconds=self.protocol),
            store_timeout=timedelta(seconds=self.store),
            **changes,
        )


def small_engine(
    world_size: int,
    *,
    autodp: pt.AutoDPConfig,
    freezes: Sequence[int],
    folder: str | None = None,
    freeze_every: int | None = None,
    prepare_steps: int = 0,
    num_stages: int | None = None,
    halfway: Callable[[], None] = lambda: None,
    width: int = WIDTH,
) -> pt.PipeTransformer:
    """Return an engine over the small model; K is forced, by default to all ranks."""
    config = pt.Config(
        seed=3,
        eval_microbatch_rows=8,
        freeze_every=freeze_every,
        prepare_steps=prepare_steps,
        plan=pt.PlanConfig(
            num_stages=num_stages or world_size,
            num_microbatches=2,
            reshape="always",
            replicas="all",
        ),
        # A full disk is to take its lead out of the run.
        checkpoint=pt.CheckpointConfig(directory=folder, keep=100, max_failures=1),
        autodp=autodp,
    )
    return pt.PipeTransformer(
        small_model(width=width),
        optimizer=lambda params: Momentum(params, halfway),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 5, 0.9),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(list(freezes)),
        units=list(range(2, DEPTH + 2)),
        config=config,
    )


def state_hash(weights: Iterable[Tensor], moments: Iterable[Tensor]) -> str:
    """Return a short hash of the bits of weights and moments, in their order."""
    total = hashlib.sha256()
    for tensor in (*weights, *moments):
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def engine_state(engine: pt.PipeTransformer) -> list[Tensor]:
    """Return weights and moments of an active rank, in the order of parameters."""
    state = engine.optimizer.state
    parameters = list(engine._arguments.parameters)
    return [*parameters, *(state[p]["momentum"] for p in parameters if p in state)]


def engine_hash(engine: pt.PipeTransformer) -> str:
    """Return `state_hash` of an active rank."""
    return state_hash(engine_state(engine), [])
