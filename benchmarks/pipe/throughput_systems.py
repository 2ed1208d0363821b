"""The systems of ``pipe_throughput.py``: name, step, and what bounds their speed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipe.bounds import pipeline_speedup, zero_bubble_speedup
from pipe.encoder import Shape, batch, encoder, mean_loss, train_step
from pipe.pipes import load_factory, recomputed_share, tensor_of
from pipe.rank_systems import DDP, SCHEDULES
from pipetransformer.pipe import Pipe

ONE_THREAD = "one thread"
INFERENCE = "inference, one thread"
OUR_SCHEDULES = ("gpipe", "1f1b", "zb-h1")

Step = Callable[[], None]
# What torch.distributed.pipelining offers for each of our schedules.
RIVAL_OF = {
    "gpipe": "pipelining gpipe",
    "1f1b": "pipelining 1f1b",
    "zb-h1": "pipelining 1f1b",
}


@dataclass(frozen=True)
class System:
    """One way to train a step.

    Attributes:
        kind: A schedule, a rival, or ``one thread``.
        microbatches: M; 0 for a whole batch.
        bound: Speed-up over one thread that it can reach at best; None: not a pipe.
        step: Trains a step in this process; None for the process systems.
        model: What the step trains; None for the process systems.
        measure: Name of the plain system that it is compared with.
    """

    kind: str
    microbatches: int
    bound: float | None
    step: Step | None
    model: nn.Sequential | None
    measure: str = ONE_THREAD

    @property
    def name(self) -> str:
        """The kind with its M."""
        return f"{self.kind} M={self.microbatches}" if self.microbatches else self.kind


class Maker:
    """Builds the systems for one set of options; each has weights of its own.

    Args:
        args: Options of the script.
        shape: Of the encoder.
    """

    def __init__(self, args: argparse.Namespace, shape: Shape) -> None:
        self._args = args
        self._shape = shape
        self._inputs, self._targets = batch(shape, args.seed)

    def one_thread(self, microbatches: int = 0) -> System:
        """Return the plain model, on the whole batch or on M parts of it."""
        model = encoder(self._shape, self._args.seed)
        parts = max(1, microbatches)
        pieces = list(
            zip(self._inputs.chunk(parts), self._targets.chunk(parts), strict=True)
        )

        def step() -> None:
            model.zero_grad()
            for inputs, targets in pieces:
                loss = mean_loss(model(inputs), targets) * (
                    len(inputs) / len(self._inputs)
                )
                loss.backward()  # type: ignore[no-untyped-call]

        return System(ONE_THREAD, microbatches, None, step, model)

    def ours(
        self, schedule: str, microbatches: int, checkpoint: str = "never"
    ) -> System:
        """Return our pipeline; a recomputed forward is a third of a cell's work."""
        model = encoder(self._shape, self._args.seed)
        pipe = self._pipe(model, microbatches, schedule, checkpoint)

        def with_loss() -> None:
            model.zero_grad()
            loss: Tensor = pipe(self._inputs, targets=self._targets)
            loss.backward()  # type: ignore[no-untyped-call]

        def step() -> None:
            train_step(pipe, self._inputs, self._targets)

        bound = zero_bubble_speedup if schedule == "zb-h1" else pipeline_speedup
        work = 1 + recomputed_share(checkpoint, microbatches) / 3
        return System(
            schedule if checkpoint == "never" else f"{schedule} {checkpoint}",
            microbatches,
            bound(self._args.slots, microbatches) / work,
            step if schedule == "gpipe" else with_loss,
            model,
        )

    def inference(self, microbatches: int) -> System:
        """Return forward without gradients, through the pipeline or plain for M = 0."""
        model = encoder(self._shape, self._args.seed).eval()
        call: nn.Module = model
        if microbatches:
            call = self._pipe(model, microbatches, "gpipe", "never")

        def step() -> None:
            with torch.no_grad():
                call(self._inputs)

        kind = "inference, gpipe" if microbatches else INFERENCE
        bound = None
        if microbatches:
            bound = pipeline_speedup(self._args.slots, microbatches)
        return System(kind, microbatches, bound, step, None, INFERENCE)

    def _pipe(
        self, model: nn.Sequential, microbatches: int, schedule: str, checkpoint: str
    ) -> Pipe:
        return Pipe.from_plan(
            model,
            cuts=self.cuts(),
            num_microbatches=microbatches,
            checkpoint=checkpoint,
            schedule=schedule,
            loss=None if schedule == "gpipe" else mean_loss,
            dispatch=self._args.dispatch,
        )

    def given(self, microbatches: int) -> System:
        """Return the pipeline that ``--pipe`` names."""
        args, model = self._args, encoder(self._shape, self._args.seed)
        call = load_factory("--pipe", args.pipe)(
            model, num_stages=args.slots, chunks=microbatches, checkpoint="never"
        )

        def step() -> None:
            model.zero_grad()
            loss = mean_loss(tensor_of(call(self._inputs)), self._targets)
            loss.backward()  # type: ignore[no-untyped-call]

        bound = pipeline_speedup(args.slots, microbatches)
        return System(args.pipe, microbatches, bound, step, model)

    def in_processes(self, kind: str, microbatches: int) -> System:
        """Return a system that a pool of ranks runs."""
        slots = self._args.slots
        bound = float(slots)
        if kind != DDP:
            bound = pipeline_speedup(slots, microbatches)
        return System(kind, microbatches, bound, None, None)

    def all(self) -> list[System]:
        """Return the systems in the order in which they take turns."""
        args = self._args
        systems = [self.one_thread()]
        for count in args.microbatches:
            systems.append(self.one_thread(count))
            systems += [self.ours(schedule, count) for schedule in args.schedules]
            if not args.no_processes:
                systems += [self.in_processes(kind, count) for kind in SCHEDULES]
            if args.pipe is not None:
                systems.append(self.given(count))
        if not args.no_processes:
            systems.append(self.in_processes(DDP, 0))
        if args.modes:
            most = max(args.microbatches)
            systems += [self.ours("gpipe", most, m) for m in ("except_last", "always")]
            systems += [self.inference(0), self.inference(most)]
        return systems

    def cuts(self) -> list[int]:
        """Return the borders of equal stages."""
        size = self._shape.blocks // self._args.slots
        return [size * j for j in range(self._args.slots + 1)]
