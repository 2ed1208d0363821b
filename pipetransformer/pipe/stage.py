"""A stage: layers called one after another, and how checkpointing calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _NormBase

from pipetransformer import _C
from pipetransformer.pipe.batchnorm import DeferredBatchNorm
from pipetransformer.pipe.skip.stage import with_lanes, with_own_tracker
from pipetransformer.skip.layout import Lane
from pipetransformer.skip.wrapper import Skippable


class PipeSequential(nn.Sequential):
    """A Sequential that takes several inputs and spreads tuples between layers.

    Keyword arguments go to the first layer. As a stage of a pipeline, each layer
    draws its random numbers under its own absolute index when the call runs in a draw
    scope.

    Args:
        *layers: The layers.
        first_layer: Absolute index of the first one; None: all of them draw as the
            layer that calls this one.
        plain_names: Each layer's name in the Sequential it comes from; None: its
            index.
        spreads_lists: Whether a list that a layer returns is spread like a tuple.
    """

    def __init__(
        self,
        *layers: nn.Module,
        first_layer: int | None = None,
        plain_names: Sequence[str] | None = None,
        spreads_lists: bool = True,
    ) -> None:
        super().__init__(*layers)
        self.first_layer = first_layer or 0
        self._sets_draw_layer = first_layer is not None
        self.plain_names = tuple(
            plain_names if plain_names is not None else self._modules
        )
        self._spread = (tuple, list) if spreads_lists else (tuple,)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Call the layers in order; a tuple or list output is spread."""
        if kwargs and not len(self):
            raise TypeError(
                "keyword arguments: expected none without a layer to take them, got "
                f"{sorted(kwargs)}"
            )
        value: object = inputs[0] if len(inputs) == 1 else inputs
        for k, layer in enumerate(self):
            if self._sets_draw_layer:
                _C.pipe.set_draw_layer(self.first_layer + k)
            if k == 0:
                value = layer(*inputs, **kwargs)
            elif isinstance(value, self._spread):
                value = layer(*value)
            else:
                value = layer(value)
        return value


StageFunction = Callable[..., object]
StageFunctions = tuple[StageFunction, StageFunction, tuple[nn.Module, ...] | None]


def stage_functions(
    stage: PipeSequential,
    popped: Sequence[Lane],
    stashed: Sequence[Lane],
    unused: set[Lane],
) -> StageFunctions:
    """Return the ways to call a stage: forward, and forward again.

    Args:
        stage: The stage.
        popped: Skip lanes that end here.
        stashed: Skip lanes that begin here. With lanes the functions take and give
            their values too, see `with_lanes`.
        unused: Lanes that carry nothing, filled by the functions; of one call of the
            pipeline.

    Returns:
        The two functions, and the layers where calling one after another is the same
        as calling the stage: the engine then does without a call of the stage itself.
    """
    again: StageFunction = stage
    if any(_counts_rows(layer) for layer in stage.modules()):
        again = functools.partial(_call_keeping_statistics, stage)
    if popped or stashed:
        forward = with_lanes(stage, popped, stashed, unused)
        return forward, with_lanes(again, popped, stashed, unused), None
    if any(isinstance(layer, Skippable) for layer in stage.modules()):
        return with_own_tracker(stage), with_own_tracker(again), None
    plain = again is stage and _is_a_chain(stage)
    return stage, again, tuple(stage) if plain else None


def _is_a_chain(stage: PipeSequential) -> bool:
    return (
        type(stage) is PipeSequential
        and stage._sets_draw_layer
        and list in stage._spread
        and "forward" not in stage.__dict__
        and stage._compiled_call_impl is None
        and not any(
            getattr(stage, name) or getattr(torch_module, f"_global{name}")
            for name in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_backward_hooks",
                "_backward_pre_hooks",
            )
        )
    )


def _counts_rows(layer: nn.Module) -> bool:
    return (
        isinstance(layer, _NormBase)
        and not isinstance(layer, DeferredBatchNorm)  # sees to it by itself
        and layer.track_running_stats
        and layer.training
    )


def _call_keeping_statistics(
    stage: PipeSequential, *inputs: object, **kwargs: object
) -> object:
    # Running statistics count a micro-batch once, in its forward. Through `.data`,
    # since autograd must not take the restored buffer for a changed one.
    kept = [
        (buffer, buffer.clone())
        for norm in stage.modules()
        if _counts_rows(norm)
        for buffer in norm.buffers(recurse=False)
    ]
    try:
        return stage(*inputs, **kwargs)
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)
