"""How the calls of a pipeline reach the C++ engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from pipetransformer import _C
from pipetransformer.pipe.ablation import Ablation
from pipetransformer.pipe.draws import draw_scope, keyed_draws_work
from pipetransformer.pipe.no_chunk import unwrap_whole
from pipetransformer.pipe.stage import PipeSequential, stage_functions
from pipetransformer.pipe.workers import Workers
from pipetransformer.skip.layout import Lane, inspect_lanes

Arguments = tuple[tuple[object, ...], Mapping[str, object]]


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How a pipeline runs, fixed when it is built.

    Args:
        num_microbatches: Micro-batches to cut a mini-batch into, at least 1.
        even: Whether their sizes are at most one row apart, not as `Tensor.chunk`.
        min_rows: Least rows of one, with `even`: a short mini-batch makes fewer.
        dispatch: ``"auto"``, ``"serial"`` or ``"threads"``.
        strict: Whether to follow the removed torch Pipe exactly, see `set_strict`.
        spread: Whether a tuple between stages becomes the arguments of the next.
        own_streams: Whether each stage of an accelerator computes on its own stream.
        nested: Whether inputs may hold their tensors in containers alone.
    """

    num_microbatches: int
    even: bool = False
    min_rows: int = 1
    dispatch: str = "auto"
    strict: bool = False
    spread: bool = True
    own_streams: bool = False
    nested: bool = False


class Runner:
    """Runs one pipeline's calls on its workers.

    Args:
        stages: The stages.
        devices: The device of each.
        settings: How to run.
        workers: Shared workers, at least one per stage; None: own ones, started by
            the first call that needs them.
        seed: Seed of the random draws once `position` is set.
    """

    def __init__(
        self,
        stages: Sequence[PipeSequential],
        devices: Sequence[torch.device],
        settings: RunSettings,
        *,
        workers: Workers | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.ablation = Ablation()
        self.position: tuple[int, int] | None = None
        self.lanes = inspect_lanes(stages)
        self._devices = list(devices)
        self._seed = seed
        self._workers = workers
        self._own_workers: Workers | None = None
        self._engine: _C.pipe.PipeEngine | None = None

    def forward(
        self, stages: Sequence[PipeSequential], arguments: Arguments, checkpoint: str
    ) -> object:
        """Run a mini-batch forward; autograd runs the backward."""
        args, kwargs = arguments
        options = self._options(checkpoint, record=torch.is_grad_enabled())
        on_cpu = all(device.type == "cpu" for device in self._devices)
        if checkpoint == "never" and not (options.dispatch == "serial" and on_cpu):
            self._check_nothing_cached(stages, options)
        return self._get_engine(stages).forward(
            self._call_stages(stages, record=options.record),
            args,
            dict(kwargs),
            options,
        )

    def step(
        self,
        stages: Sequence[PipeSequential],
        arguments: Arguments,
        checkpoint: str,
        *,
        targets: object,
        loss: Callable[..., object],
        schedule: str,
        record: bool,
    ) -> torch.Tensor:
        """Run forward, loss and, with `record`, backward in one schedule."""
        args, kwargs = arguments
        options = self._options(checkpoint, record=record)
        self._check_nothing_cached(stages, options)
        return self._get_engine(stages).step(
            self._call_stages(stages, record=record),
            args,
            dict(kwargs),
            targets,
            loss,
            schedule,
            options,
        )

    def run(
        self, stages: Sequence[PipeSequential], calls: Sequence[Arguments]
    ) -> list[object]:
        """Run given micro-batches forward, without gradients."""
        return self._get_engine(stages).run(
            self._call_stages(stages, record=False),
            [self.plain_arguments(call) for call in calls],
            self._options("never", record=False),
        )

    def plain_arguments(
        self, arguments: Arguments
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return arguments that are not cut, whole tensors taken out."""
        # The old interface hands containers on as they are.
        depth = 0 if self.settings.strict else -1
        args = tuple(unwrap_whole(value, depth=depth) for value in arguments[0])
        kwargs = arguments[1]
        return args, {k: unwrap_whole(v, depth=depth) for k, v in kwargs.items()}

    def plain_scope(self, stage: PipeSequential) -> AbstractContextManager[object]:
        """Return what a call of a lone stage in this thread draws from."""
        if self.settings.strict:
            return nullcontext()
        step, microbatch = self.position or (0, 0)
        seed, first = self._call_seed(), stage.first_layer
        return draw_scope(seed, step, microbatch=microbatch, layer=first)

    def plain_result(self, value: object) -> object:
        """Return what a lone stage gave as a pipeline gives it."""
        if type(value) is torch.Tensor and value.dim() > 0:
            return value
        return _C.pipe.gather_one(value, self.settings.strict)

    def current_dispatch(self) -> str:
        """Return "serial" or "threads": what the next call uses."""
        if self._serial_only() or self.settings.dispatch != "auto":
            return "serial" if self._serial_only() else self.settings.dispatch
        blocking = all(device.type == "cpu" for device in self._devices)
        if self._engine is None:
            return "threads" if blocking else "serial"
        return self._engine.current_dispatch()

    def close(self) -> None:
        """End the own worker threads; a later call starts new ones."""
        if self._own_workers is not None:
            self._own_workers.close()  # first: refused on one of them
            self._own_workers = None
        self._engine = None

    def _serial_only(self) -> bool:
        # Draws from the global generators have to come in one order.
        return self.settings.strict or self.settings.dispatch == "serial"

    def _options(self, checkpoint: str, *, record: bool) -> _C.pipe.CallOptions:
        settings = self.settings
        options = _C.pipe.CallOptions()
        options.num_microbatches = settings.num_microbatches
        options.even = settings.even
        options.min_rows = settings.min_rows
        options.checkpoint = checkpoint
        options.dispatch = "serial" if self._serial_only() else settings.dispatch
        options.strict = settings.strict
        options.spread = settings.spread
        options.order_rule = self.ablation.order_rule
        options.early_recompute = self.ablation.early_recompute
        options.copy_streams = self.ablation.copy_streams
        options.record = record
        options.draws = self._draws()
        return options

    def _check_nothing_cached(
        self, stages: Sequence[PipeSequential], options: _C.pipe.CallOptions
    ) -> None:
        # Micro-batches would share the graph of what is cached, and the first
        # backward of one would free it.
        several = options.record and options.num_microbatches > 1
        if not several or not getattr(parametrize, "_cache_enabled", 0):
            return
        if any(
            parametrize.is_parametrized(layer)
            and any(parameter.requires_grad for parameter in layer.parameters())
            for stage in stages
            for layer in stage.modules()
        ):
            raise RuntimeError(
                "pipe: expected to be called outside of torch.nn.utils.parametrize."
                "cached(), since micro-batches go backward one by one, got called in "
                "it; on the CPU it works with schedule='gpipe', checkpoint='never' and "
                "dispatch='serial'"
            )

    def _call_stages(
        self, stages: Sequence[PipeSequential], *, record: bool
    ) -> _C.pipe.CallStages:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # Values of vmap do not say that they require grad.
            tensors = [(*stage.parameters(), *stage.buffers()) for stage in stages]
            _C.pipe.check_no_tangents([t for several in tensors for t in several])
        # Given to every call, not kept in C++: there the garbage collector would not
        # see a hook of a layer that refers to this pipe.
        unused: set[Lane] = set()
        functions = [
            stage_functions(
                stage,
                [lane for lane in self.lanes if lane.destination == j],
                [lane for lane in self.lanes if lane.source == j],
                unused,
            )
            for j, stage in enumerate(stages)
        ]
        parameters: list[list[torch.Tensor]] = [
            [p for p in stage.parameters() if p.requires_grad] if record else []
            for stage in stages
        ]
        return _C.pipe.CallStages(functions, parameters)

    def _call_seed(self) -> int | None:
        # None: the caller's generator gives it, if a cell draws.
        return None if self.position is None else self._seed % 2**64

    def _draws(self) -> _C.pipe.DrawSettings:
        step, microbatch = self.position or (0, 0)
        if self.settings.strict:
            return _C.pipe.DrawSettings("global", None, step, microbatch)
        mode = "keyed" if keyed_draws_work() else "fallback"
        return _C.pipe.DrawSettings(mode, self._call_seed(), step, microbatch)

    def _get_engine(self, stages: Sequence[PipeSequential]) -> _C.pipe.PipeEngine:
        if self._engine is None:
            _check_initialised(stages)
            workers = self._workers
            if workers is None:
                num_workers = 1 if self._serial_only() else len(stages)
                workers = self._own_workers = Workers(
                    num_workers,
                    intra_op_threads=max(1, torch.get_num_threads() // num_workers),
                )
            self._engine = _C.pipe.PipeEngine(
                workers.pool,
                self._devices,
                [stage.first_layer for stage in stages],
                [(lane.source, lane.destination) for lane in self.lanes],
                self.settings.own_streams,
            )
        return self._engine

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        # Threads do not travel: a copy makes its own when it is first called.
        state.update(_workers=None, _own_workers=None, _engine=None)
        return state


def _check_initialised(stages: Sequence[PipeSequential]) -> None:
    for stage in stages:
        for name, value in (*stage.named_parameters(), *stage.named_buffers()):
            if is_lazy(value):
                raise RuntimeError(
                    f"layers: expected initialised ones, got {name!r} of a lazy layer; "
                    "call the module once before it becomes a pipe"
                )
