"""The pipeline as an ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from pipetransformer.pipe.batchnorm import DeferredBatchNorm, one_mini_batch
from pipetransformer.pipe.build import stages_by_cuts, stages_by_device
from pipetransformer.pipe.construction import (
    check_chunks,
    check_dispatch,
    check_mode,
    check_module,
    check_schedule,
)
from pipetransformer.pipe.input_checks import check_inputs
from pipetransformer.pipe.layers import StageLayers
from pipetransformer.pipe.placement import FixedPlacement
from pipetransformer.pipe.result import PipeResult
from pipetransformer.pipe.runner import Arguments, Runner, RunSettings
from pipetransformer.pipe.stage import PipeSequential
from pipetransformer.pipe.strict import check_rpc, is_strict
from pipetransformer.pipe.workers import Workers
from pipetransformer.planner import least_rows


class Pipe(StageLayers, FixedPlacement):
    """Runs an ``nn.Sequential`` as a pipeline of stages in one process.

    The mini-batch is cut into micro-batches along dimension 0; the stages work on
    different micro-batches at the same time, each on its own worker thread, in
    GPipe's order. To autograd, and so to DistributedDataParallel, it is one module:
    each parameter's gradient arrives once per backward, summed over micro-batches,
    stage by stage as the stages finish.

    On CPU every child with parameters is a stage; neighbours on the same other device
    form one. A child without parameters joins the stage before it, unless a
    `WithDevice` names its device. Parameters are named
    ``partitions.{stage}.{layer}.<rest>``. The pipeline starts in the mode of
    ``module``, training or eval.

    Args:
        module: The layers; their parameters are shared with this module.
        chunks: Number of micro-batches, cut as ``torch.Tensor.chunk`` does.
        checkpoint: ``"always"``, ``"except_last"`` (all but the last micro-batch)
            or ``"never"``: which micro-batches keep only their stage inputs and
            compute the rest again in backward.
        deferred_batch_norm: Whether the batch norms of ``module`` are replaced, in
            place, by `DeferredBatchNorm`: one update of the running statistics per
            mini-batch.
        return_tensors: Whether a call returns the bare output, as from a pipeline
            made by `from_plan`, instead of a `PipeResult` that holds it.
        schedule: ``"gpipe"``; or ``"1f1b"`` or ``"zb-h1"``, which run forward and
            backward of different micro-batches in turns. A call is then
            ``pipe(*inputs, targets=t)`` and returns the loss, the gradients ready;
            ``loss.backward()`` delivers them.
        loss: With the latter two: ``loss(output, targets)``, a scalar mean over the
            rows of a micro-batch; without parameters that train.
        dispatch: ``"threads"``: a thread per stage; ``"serial"``: one for all, which
            runs cells in one order, as layers with collectives need it;
            ``"auto"``: chosen from measured times. Results are equal; where layers
            of several stages share a parameter, up to the order of its sum.

    Raises:
        ValueError: for a number of micro-batches below 1, an unknown mode, schedule
            or dispatch, a schedule that lacks its loss or does not use one, a child
            given twice or on two devices, or a parameter shared across devices.
        TypeError: if ``module`` is not an ``nn.Sequential``, its skippables do not
            fit together, or ``loss`` is not callable.
        RuntimeError: without an RPC agent, with `set_strict` only.

    Source: GPipe (Huang et al., 2019); 1F1B of PipeDream-Flush (Narayanan et al.,
    2021); ZB-H1 (Qi et al., 2024); paper section 3.1 for the single process.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        return_tensors: bool = False,
        schedule: str = "gpipe",
        loss: Callable[..., object] | None = None,
        dispatch: str = "auto",
    ) -> None:
        super().__init__()
        strict = is_strict()
        if strict:
            check_rpc()
        chunks, checkpoint = int(chunks), str(checkpoint)
        check_chunks(chunks)
        check_mode(checkpoint)
        check_module(module)
        if deferred_batch_norm:
            DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        check_schedule(schedule, loss)
        check_dispatch(dispatch)
        stages, devices = stages_by_device(module, strict=strict)
        settings = RunSettings(chunks, dispatch=dispatch, strict=strict)
        runner = Runner(stages, devices, settings)
        self._set_up(stages, devices, checkpoint, runner, schedule, loss)
        self._take_mode(module)
        self.return_tensors = bool(return_tensors)

    @classmethod
    def from_plan(
        cls,
        layers: nn.Sequential,
        *,
        cuts: Sequence[int],
        num_microbatches: int,
        checkpoint: str = "never",
        devices: Sequence[torch.device] | None = None,
        workers: Workers | None = None,
        first_layer: int = 0,
        seed: int = 0,
        schedule: str = "gpipe",
        loss: Callable[..., object] | None = None,
        dispatch: str = "auto",
        own_streams: bool = False,
    ) -> Pipe:
        """Build a pipeline from a plan; nothing is inferred.

        Args:
            layers: The active layers.
            cuts: K+1 rising indices into ``layers``, from 0 to ``len(layers)``.
            num_microbatches: Micro-batches; their sizes are at most one row apart.
                Fewer for a mini-batch without a row, or two if there is batch norm,
                for each.
            checkpoint: As for the constructor.
            devices: One per stage; None means CPU slots.
            workers: Shared worker threads, at least one per stage; None: own ones.
            first_layer: Absolute index of ``layers[0]``, for the random draws.
            seed: Seed of the random draws, see `set_draw_position`.
            schedule: As for the constructor.
            loss: As for the constructor.
            dispatch: As for the constructor.
            own_streams: On accelerators, compute each stage on a stream of its own, so
                that stages of one device overlap; by default stages compute on the
                caller's current stream of their device.

        Raises:
            ValueError, TypeError: as the constructor, and for cuts, devices or
                workers that do not fit.
        """
        check_module(layers)
        if num_microbatches < 1:
            raise ValueError(
                f"num_microbatches: expected at least 1, got {num_microbatches}"
            )
        check_mode(checkpoint)
        check_schedule(schedule, loss)
        check_dispatch(dispatch)
        stages, places = stages_by_cuts(layers, cuts, devices, first_layer)
        if workers is not None and workers.num_workers < len(stages):
            raise ValueError(
                f"workers: expected at least one per stage ({len(stages)}), got "
                f"{workers.num_workers}"
            )
        pipe = cls.__new__(cls)
        nn.Module.__init__(pipe)
        settings = RunSettings(
            num_microbatches,
            even=True,
            nested=True,
            min_rows=least_rows(layers),
            dispatch=dispatch,
            own_streams=own_streams,
        )
        runner = Runner(stages, places, settings, workers=workers, seed=seed)
        pipe._set_up(stages, places, checkpoint, runner, schedule, loss)
        pipe._take_mode(layers)
        pipe._norms = pipe._find_norms()  # the layers of a plan stay
        return pipe

    def _set_up(
        self,
        stages: list[PipeSequential],
        devices: list[torch.device],
        checkpoint: str,
        runner: Runner,
        schedule: str,
        loss: Callable[..., object] | None,
    ) -> None:
        self.partitions = nn.ModuleList(stages)
        self.devices = devices
        self.checkpoint = checkpoint
        self.return_tensors = True
        self.schedule = schedule
        self._loss = (loss,)  # a module in a tuple is no child: nothing of it trains
        self._runner = runner
        self._norms: list[DeferredBatchNorm] | None = None  # None: layers may change

    def _take_mode(self, module: nn.Sequential) -> None:
        # The layers keep theirs: one of them may be held still.
        for container in (self, self.partitions, *self.partitions):
            container.training = module.training

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, M; fewer when a mini-batch has fewer rows."""
        return self._runner.settings.num_microbatches

    @property
    def chunks(self) -> int:
        """The same under its old name."""
        return self.num_microbatches

    def set_draw_position(self, *, step: int, first_microbatch: int) -> None:
        """Key the random draws of the next calls.

        Draws then depend on (seed, step, micro-batch, layer) only. Without this
        call the seed of every forward in which a layer draws is one draw from the
        default CPU generator.

        Args:
            step: Optimizer step.
            first_microbatch: Number of this pipeline's first micro-batch, counted
                over all replicas.
        """
        self._runner.position = (step, first_microbatch)

    def current_dispatch(self) -> str:
        """Return "serial" or "threads": how the next call is run."""
        return self._runner.current_dispatch()

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Run a mini-batch through the pipeline.

        Args:
            *inputs: Arguments of the first layer. Tensors ``(rows, ...)``, also
                inside tuples, lists and dicts, are cut along dimension 0; other
                values go to every micro-batch as they are.
            **kwargs: Keyword arguments of the first layer, treated likewise.

        With a schedule that takes the loss, ``targets=`` is needed as well: a tensor,
        or tensors in containers, cut like the inputs and moved to the last device.
        In eval mode or without gradients only the forward runs.

        Returns:
            The mean loss over all rows, 0-dim, with such a schedule; otherwise what
            the last layer returns, its tensors put together along dimension 0;
            other values as lists with one entry per micro-batch. It comes in a
            `PipeResult` unless ``return_tensors``.

        Raises:
            TypeError: if no argument is itself a tensor, or a stage returns none.
            ValueError: if a tensor is not on the first stage's device.
            RuntimeError: for tensors whose rows give different numbers of
                micro-batches, and 0-dim inputs or outputs.
        """
        loss = self._loss[0]
        targets = self._take_targets(kwargs) if loss is not None else None
        self._check_inputs(inputs, kwargs)
        stages = self._stages()
        if not stages:
            output = inputs[0] if len(inputs) == 1 else inputs
            return self._result(output if loss is None else loss(output, targets))
        mode = self.checkpoint if self._is_training(stages) else "never"
        if loss is not None:
            found = self._step(stages, (inputs, kwargs), targets, loss, self.schedule)
            return self._result(found)
        with one_mini_batch(self._deferred_norms()):
            return self._result(self._call(stages, (inputs, kwargs), mode))

    def _call(
        self, stages: Sequence[PipeSequential], arguments: Arguments, mode: str
    ) -> object:
        runner = self._runner
        if len(stages) == runner.settings.num_microbatches == 1 and mode != "always":
            # In this thread, as the plain module it is: autograd's own graph of the
            # layers, without node or worker, so DDP overlaps its all-reduce bucket by
            # bucket.
            stage = stages[0]
            args, named = runner.plain_arguments(arguments)
            with runner.plain_scope(stage):
                output = stage(*args, **named)
            return runner.plain_result(output)
        return runner.forward(stages, arguments, mode)

    def step(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        targets: object,
        loss: Callable[..., object],
        schedule: str,
    ) -> torch.Tensor:
        """Run a mini-batch with its loss and backward, also where a call would not.

        Args:
            args: Positional arguments of the first layer, as for a call.
            kwargs: Keyword arguments of the first layer.
            targets: As for a call of a pipeline with such a schedule.
            loss: As for the constructor.
            schedule: ``"1f1b"`` or ``"zb-h1"``.

        Returns:
            The mean loss over all rows, 0-dim; ``backward()`` delivers the gradients,
            scaled by what arrives.

        Raises:
            ValueError: for another schedule, and as a call.
        """
        if schedule == "gpipe":
            raise ValueError("schedule: expected '1f1b' or 'zb-h1', got 'gpipe'")
        check_schedule(schedule, loss)
        self._check_inputs(args, kwargs)
        return self._step(self._stages(), (args, kwargs), targets, loss, schedule)

    def _step(
        self,
        stages: Sequence[PipeSequential],
        arguments: Arguments,
        targets: object,
        loss: Callable[..., object],
        schedule: str,
    ) -> torch.Tensor:
        mode = self.checkpoint if self._is_training(stages) else "never"
        record = torch.is_grad_enabled() and self._is_training(stages)
        with one_mini_batch(self._deferred_norms()):
            return self._runner.step(
                stages,
                arguments,
                mode,
                targets=targets,
                loss=loss,
                schedule=schedule,
                record=record,
            )

    def _result(self, value: object) -> object:
        return value if self.return_tensors else PipeResult(value)

    def run(
        self, microbatches: Sequence[tuple[object, ...] | Mapping[str, object]]
    ) -> list[object]:
        """Run given micro-batches forward, pipelined over the stages.

        Args:
            microbatches: For each micro-batch the arguments of the first layer: a
                tuple of positional ones or a mapping of keywords; any number, of any
                sizes.

        Returns:
            The last stage's output for each micro-batch.

        Raises:
            RuntimeError: if gradients are being recorded.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Pipe.run: expected gradients to be off (torch.no_grad()), got on"
            )
        calls: list[Arguments] = []
        for given in microbatches:
            if not isinstance(given, (tuple, Mapping)):
                raise TypeError(
                    "micro-batch: expected a tuple or mapping of arguments, got "
                    f"{type(given).__name__}"
                )
            if isinstance(given, Mapping):
                calls.append(((), dict(given)))
            else:
                calls.append((given, {}))
            self._check_inputs(*calls[-1])
        if self.num_stages == 0:
            return [args[0] if len(args) == 1 else args for args, _ in calls]
        if not calls:
            return []
        return self._runner.run(self._stages(), calls)

    def close(self) -> None:
        """End the worker threads that belong to this pipeline; idempotent.

        Shared workers are left alone. A later call starts new threads.

        Raises:
            RuntimeError: when called on one of them, as by a layer or a hook.
        """
        self._runner.close()

    def _take_targets(self, kwargs: dict[str, object]) -> object:
        if "targets" not in kwargs:
            raise TypeError(
                f"targets: expected targets=... with schedule {self.schedule!r}, got "
                "none"
            )
        return kwargs.pop("targets")

    def _deferred_norms(self) -> list[DeferredBatchNorm]:
        norms = self._find_norms() if self._norms is None else self._norms
        return [norm for norm in norms if norm.training]

    def _find_norms(self) -> list[DeferredBatchNorm]:
        layers = self.partitions.modules()
        return [layer for layer in layers if isinstance(layer, DeferredBatchNorm)]

    def _is_training(self, stages: Sequence[PipeSequential]) -> bool:
        # Layers that are held still, a frozen front say, may be in eval mode.
        return any(stage.training for stage in stages)

    def _check_inputs(
        self, inputs: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        first = self.devices[0] if self.devices else None
        settings = self._runner.settings
        check_inputs(
            inputs, kwargs, first, strict=settings.strict, nested=settings.nested
        )
