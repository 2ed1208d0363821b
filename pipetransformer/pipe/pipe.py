"""The pipeline as an ``nn.Module``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from pipetransformer.pipe import _binding
from pipetransformer.pipe.build import (
    check_mode,
    check_module,
    stages_by_cuts,
    stages_by_device,
)
from pipetransformer.pipe.draws import draw_scope
from pipetransformer.pipe.stage import PipeSequential, StageFunctions, stage_functions
from pipetransformer.pipe.workers import Workers


class Pipe(nn.Module):
    """Runs an ``nn.Sequential`` as a pipeline of stages in one process.

    The mini-batch is cut into micro-batches along dimension 0; the stages work on
    different micro-batches at the same time, each on its own worker thread, in
    GPipe's order. To autograd, and so to DistributedDataParallel, it is one module:
    each parameter's gradient arrives once per backward, summed over micro-batches,
    stage by stage as the stages finish.

    On CPU every child is a stage of its own; neighbours on the same other device
    form one stage. Parameters are named ``partitions.{stage}.{layer}.<rest>``.

    Args:
        module: The layers; their parameters are shared with this module.
        chunks: Number of micro-batches, cut as ``torch.Tensor.chunk`` does.
        checkpoint: ``"always"``, ``"except_last"`` (all but the last micro-batch)
            or ``"never"``: which micro-batches keep only their stage inputs and
            compute the rest again in backward.

    Raises:
        ValueError: for a number of micro-batches below 1, an unknown mode, a child
            given twice or on two devices, or a parameter shared across devices.
        TypeError: if ``module`` is not an ``nn.Sequential``.

    Source: GPipe order, and paper section 3.1 for the single-process pipeline.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
    ) -> None:
        super().__init__()
        chunks, checkpoint = int(chunks), str(checkpoint)
        if chunks <= 0:
            raise ValueError(f"chunks: expected at least 1, got {chunks}")
        check_mode(checkpoint)
        check_module(module)
        stages, devices = stages_by_device(module)
        self._set_up(stages, devices, chunks, checkpoint, even=False)

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
        own_streams: bool = False,
        copy_streams: bool = True,
    ) -> Pipe:
        """Build a pipeline from a plan; nothing is inferred.

        Args:
            layers: The active layers.
            cuts: K+1 rising indices into ``layers``, from 0 to ``len(layers)``.
            num_microbatches: Micro-batches; their sizes are at most one row apart.
            checkpoint: As for the constructor.
            devices: One per stage; None means CPU slots.
            workers: Shared worker threads, at least one per stage; None: own ones.
            first_layer: Absolute index of ``layers[0]``, for the random draws.
            seed: Seed of the random draws, see `set_draw_position`.
            own_streams: On accelerators, compute each stage on a stream of its own,
                so that stages of one device overlap. By default stages compute on
                the caller's current stream of their device.
            copy_streams: On accelerators, copy between devices on streams that do
                nothing else, so that copies overlap with computing. False is for
                comparison.

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
        stages, places = stages_by_cuts(layers, cuts, devices, first_layer)
        if workers is not None and workers.num_workers < len(stages):
            raise ValueError(
                f"workers: expected at least one per stage ({len(stages)}), got "
                f"{workers.num_workers}"
            )
        pipe = cls.__new__(cls)
        nn.Module.__init__(pipe)
        pipe._set_up(stages, places, num_microbatches, checkpoint, even=True)
        pipe._workers = workers
        pipe._seed = seed
        pipe._own_streams, pipe._copy_streams = own_streams, copy_streams
        return pipe

    def _set_up(
        self,
        stages: list[PipeSequential],
        devices: list[torch.device],
        num_microbatches: int,
        checkpoint: str,
        *,
        even: bool,
    ) -> None:
        self.partitions = nn.ModuleList(stages)
        self.devices = devices
        self.chunks = num_microbatches
        self.checkpoint = checkpoint
        self._even = even
        self._seed = 0
        self._own_streams = False
        self._copy_streams = True
        self._position: tuple[int, int] | None = None
        self._workers: Workers | None = None
        self._own_workers: Workers | None = None
        self._engine: _binding.PipeEngine | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages, K."""
        return len(self.partitions)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, M; fewer when a mini-batch has fewer rows."""
        return self.chunks

    def set_draw_position(self, *, step: int, first_microbatch: int) -> None:
        """Key the random draws of the next calls.

        Draws then depend on (seed, step, micro-batch, layer) only. Without this
        call every forward takes a seed from the default CPU generator.

        Args:
            step: Optimizer step.
            first_microbatch: Number of this pipeline's first micro-batch, counted
                over all replicas.
        """
        self._position = (step, first_microbatch)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Run a mini-batch through the pipeline.

        Args:
            *inputs: Arguments of the first layer. Tensors ``(rows, ...)``, also
                inside tuples, lists and dicts, are cut along dimension 0; other
                values go to every micro-batch as they are.
            **kwargs: Keyword arguments of the first layer, treated likewise.

        Returns:
            What the last layer returns, its tensors put together along dimension 0;
            other values as lists with one entry per micro-batch.

        Raises:
            TypeError: if no argument is a tensor, or a stage returns none.
            ValueError: if a tensor is not on the first stage's device.
            RuntimeError: for tensors whose rows give different numbers of
                micro-batches, and 0-dim inputs or outputs.
        """
        self._check_inputs((*inputs, *kwargs.values()))
        if self.num_stages == 0:
            return inputs[0] if len(inputs) == 1 else inputs
        training = self.partitions[0].training
        mode = self.checkpoint if training else "never"
        if self._is_plain_module(mode):
            return self._call_plain(*inputs, **kwargs)
        parameters: list[list[torch.Tensor]] = [[] for _ in self.partitions]
        if torch.is_grad_enabled():
            parameters = [
                [p for p in stage.parameters() if p.requires_grad]
                for stage in self.partitions
            ]
        return self._get_engine().forward(
            self._stage_functions(),
            inputs,
            kwargs,
            parameters,
            self.chunks,
            self._even,
            mode,
            self._draws(),
        )

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
        calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
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
            self._check_inputs((*calls[-1][0], *calls[-1][1].values()))
        if self.num_stages == 0:
            return [args[0] if len(args) == 1 else args for args, _ in calls]
        if not calls:
            return []
        return self._get_engine().run(self._stage_functions(), calls, self._draws())

    def close(self) -> None:
        """End the worker threads that belong to this pipeline; idempotent.

        Shared workers are left alone. A later call starts new threads.
        """
        self._engine = None
        if self._own_workers is not None:
            self._own_workers.close()
            self._own_workers = None

    def _stages(self) -> list[PipeSequential]:
        return cast("list[PipeSequential]", list(self.partitions))

    def _stage_functions(self) -> list[StageFunctions]:
        # Given to every call, not kept in C++: there the garbage collector would not
        # see a hook of a layer that refers to this pipe.
        return [stage_functions(stage) for stage in self._stages()]

    def _is_plain_module(self, mode: str) -> bool:
        # One stage, one micro-batch: autograd's own graph of the layers, without
        # node or worker, so DDP overlaps its all-reduce bucket by bucket.
        checkpointed = mode == "always"
        return self.num_stages == 1 and self.chunks == 1 and not checkpointed

    def _call_plain(self, *inputs: object, **kwargs: object) -> object:
        step, microbatch = self._position or (0, 0)
        first_layer = self._stages()[0].first_layer
        with draw_scope(
            self._call_seed(), step, microbatch=microbatch, layer=first_layer
        ):
            return _binding.gather_one(self.partitions[0](*inputs, **kwargs))

    def _call_seed(self) -> int:
        return _binding.draw_seed() if self._position is None else self._seed

    def _draws(self) -> _binding.DrawSettings:
        step, microbatch = self._position or (0, 0)
        return _binding.DrawSettings(
            _binding.keyed_draws_work(), self._call_seed() % 2**64, step, microbatch
        )

    def _get_engine(self) -> _binding.PipeEngine:
        if self._engine is None:
            workers = self._workers
            if workers is None:
                workers = self._own_workers = Workers(self.num_stages)
            self._engine = _binding.PipeEngine(
                workers.pool,
                self.devices,
                [stage.first_layer for stage in self._stages()],
                self._own_streams,
                self._copy_streams,
            )
        return self._engine

    def _check_inputs(self, values: tuple[object, ...]) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not tensors:
            kinds = [type(value).__name__ for value in values]
            raise TypeError(
                f"inputs: expected at least one tensor among them, got {kinds}"
            )
        for tensor in tensors:
            if tensor.dim() == 0:
                raise RuntimeError(
                    "inputs: expected tensors with rows along dimension 0, got a "
                    "zero-dimensional one"
                )
            if self.devices and tensor.device != self.devices[0]:
                raise ValueError(
                    "All inputs should be on the same device as the first partition: "
                    f"expected {self.devices[0]}, got {tensor.device}"
                )

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        # Threads do not travel: a copy makes its own when it is first called.
        state.update(_workers=None, _own_workers=None, _engine=None)
        return state
