"""Our pipeline and others behind one face, for the benchmarks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.pipe import Pipe

CHECKPOINT_MODES = ("never", "except_last", "always")
DISPATCHES = ("auto", "serial", "threads")

PipeFactory = Callable[..., Callable[..., Any]]


def load_factory(option: str, name: str) -> PipeFactory:
    """Return what MODULE:ATTR names; the working folder is searched, too.

    Args:
        option: The command-line option that gave the name, for the error.
        name: MODULE:ATTR.

    Raises:
        ValueError: the name has no colon.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{option}: expected MODULE:ATTR, got {name!r}")
    sys.path.append(os.getcwd())  # the module may lie where the command was given
    factory: PipeFactory = getattr(importlib.import_module(module), attribute)
    return factory


def tensor_of(outputs: Any) -> Tensor:
    """Return a pipeline's outputs; old ones hand out a remote reference to them."""
    if isinstance(outputs, Tensor):
        return outputs
    value: Tensor = outputs.local_value()
    return value


def plain_loop(model: nn.Sequential, microbatches: int) -> Callable[[Tensor], Tensor]:
    """Return the baseline: cut, call layer after layer, put together."""
    stages = list(model)

    def call(rows: Tensor) -> Tensor:
        outputs = []
        for value in rows.chunk(microbatches):
            for stage in stages:
                value = stage(value)
            outputs.append(value)
        return torch.cat(outputs)

    return call


def recomputed_share(mode: str | None, microbatches: int) -> float:
    """Share of the cells whose forward is run again in backward."""
    if mode == "always":
        return 1.0
    return (microbatches - 1) / microbatches if mode == "except_last" else 0.0


def our_pipe(
    model: nn.Sequential, *, chunks: int, checkpoint: str, dispatch: str = "auto"
) -> Pipe:
    """Return our pipeline; every child of `model` is a stage.

    Args:
        model: The stages.
        chunks: Number of micro-batches.
        checkpoint: One of ``CHECKPOINT_MODES``.
        dispatch: One of ``DISPATCHES``.
    """
    return Pipe(model, chunks, checkpoint, return_tensors=True, dispatch=dispatch)
