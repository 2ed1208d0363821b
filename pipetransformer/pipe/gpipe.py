"""A pipeline with torchgpipe's interface: layers of one argument, balance given."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from pipetransformer import _C
from pipetransformer.pipe.batchnorm import DeferredBatchNorm
from pipetransformer.pipe.construction import check_chunks, check_mode, check_module
from pipetransformer.pipe.input_checks import check_inputs
from pipetransformer.pipe.pipe import Pipe
from pipetransformer.pipe.runner import Runner, RunSettings
from pipetransformer.pipe.stage import PipeSequential

Device = torch.device | str | int


class GPipe(Pipe):
    """Runs an ``nn.Sequential`` as a pipeline, as `Pipe` does, by GPipe's interface.

    Each layer takes and returns one value, a tensor or a tuple of tensors; a tuple is
    never spread into arguments. A call returns the bare output. The layers keep their
    names: ``partitions.{stage}.{name}.<rest>``. Whether to checkpoint depends on the
    mode of this module, not on that of its stages.

    Args:
        module: The layers; they are moved to their devices.
        balance: Number of layers of each stage.
        devices: One per stage, spare ones are dropped; None: all CUDA devices.
        chunks: Number of micro-batches.
        checkpoint: ``"always"``, ``"except_last"`` or ``"never"``.
        deferred_batch_norm: Whether batch norms update their running statistics once
            per mini-batch, see `DeferredBatchNorm`.

    Raises:
        ValueError: for a balance that does not fit, a number of micro-batches below
            1, an unknown mode, or a child or parameter that occurs twice.
        TypeError: if ``module`` is no ``nn.Sequential`` or its skips do not fit.
        IndexError: for fewer devices than stages.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
    Pipeline Parallelism".

    Example:
        >>> model = GPipe(layers, balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
        >>> output = model(x)
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        devices: Sequence[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        chunks, checkpoint = int(chunks), str(checkpoint)
        check_chunks(chunks)
        check_mode(checkpoint)
        verify_module(module)
        sizes = _checked_balance(balance, len(module))
        places = _places(devices, len(sizes))
        if deferred_batch_norm:
            DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        stages = _make_stages(module, sizes)
        for stage, place in zip(stages, places, strict=True):
            stage.to(place)
        runner = Runner(stages, places, RunSettings(chunks, spread=False))
        self._set_up(list(stages), places, checkpoint, runner, "gpipe", None)
        self._take_mode(module)
        self.balance = sizes

    @classmethod
    def from_plan(cls, layers: nn.Sequential, **options: object) -> NoReturn:
        """Refuse: a plan makes a `Pipe`. Raises TypeError."""
        raise TypeError("from_plan: expected to be called on Pipe, got GPipe")

    def forward(  # type: ignore[override]  # one argument is this class's point
        self, input: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> object:
        """Run a mini-batch through the pipeline.

        Args:
            input: A tensor ``(rows, ...)`` or a tuple of such tensors.

        Returns:
            What the last layer returns for it, a tensor or a tuple of tensors.

        Raises:
            TypeError: for anything but a tensor or a tuple of tensors, here or as the
                output of a stage.
            ValueError: for a tensor on another device than the first stage's.
            RuntimeError: for tensors whose rows give different numbers of
                micro-batches.
        """
        return super().forward(input)

    def _is_training(self, _: Sequence[PipeSequential]) -> bool:
        return self.training

    def _check_inputs(
        self, inputs: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        (value,) = inputs
        check_value("input", value)
        first = self.devices[0] if self.devices else None
        check_inputs(value if isinstance(value, tuple) else inputs, kwargs, first)


class _TupleStage(PipeSequential):
    """Calls its layers with one value each; names of the layers are kept."""

    def __init__(self, layers: OrderedDict[str, nn.Module], first_layer: int) -> None:
        super().__init__(first_layer=first_layer, plain_names=list(layers))
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        (value,) = inputs
        for k, layer in enumerate(self):
            _C.pipe.set_draw_layer(self.first_layer + k)
            value = layer(value)
        check_value("output of a stage", value)
        return value


def verify_module(module: nn.Module) -> None:
    """Raise unless a module can become a `GPipe`.

    Args:
        module: The layers.

    Raises:
        TypeError: if it is no ``nn.Sequential``, or its skips do not fit together.
        ValueError: if a child, or a parameter of two children, occurs twice.
    """
    check_module(module)
    owners: dict[int, str] = {}
    for name, child in module.named_children():
        for parameter in child.parameters():
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                raise ValueError(
                    "module with duplicate parameters in distinct children is not "
                    f"supported: expected each in one child, got one in {owner!r} and "
                    f"{name!r}"
                )


def check_value(what: str, value: object) -> None:
    """Raise TypeError unless a value is a tensor or a tuple of tensors."""
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"{what}: expected Tensor or a tuple of them, got {type(item).__name__}"
            )


def _checked_balance(balance: Sequence[int] | None, num_layers: int) -> list[int]:
    sizes = None if balance is None else [int(size) for size in balance]
    if sizes is None or min(sizes, default=1) < 1 or sum(sizes) != num_layers:
        raise ValueError(
            "balance: expected positive numbers of layers per stage with the sum "
            f"{num_layers}, got {sizes}. If the best one is not known, "
            "torchgpipe.balance finds it:\n\n"
            "    from torchgpipe.balance import balance_by_time\n"
            "    balance = balance_by_time(torch.cuda.device_count(), module, sample)\n"
            "    model = GPipe(module, balance, ...)"
        )
    return sizes


def _places(devices: Sequence[Device] | None, num_stages: int) -> list[torch.device]:
    if devices is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if len(devices) < num_stages:
        raise IndexError(
            f"devices: expected at least one per stage ({num_stages}), got too few: "
            f"{len(devices)}"
        )
    # Of "cuda" the current one is meant: tensors name their devices with an index.
    return [torch.empty(0, device=device).device for device in devices[:num_stages]]


def _make_stages(module: nn.Sequential, sizes: Sequence[int]) -> list[_TupleStage]:
    children = module._modules.items()
    firsts = [0, *itertools.accumulate(sizes)]
    return [
        _TupleStage(OrderedDict(itertools.islice(children, a, b)), a)
        for a, b in itertools.pairwise(firsts)
    ]
