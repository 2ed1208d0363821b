"""Switches parts of a pipeline off, to show what they do."""

from __future__ import annotations

from pipetransformer.pipe import Pipe
from pipetransformer.pipe.ablation import Ablation

__all__ = ["Ablation", "ablate"]


def ablate(pipe: Pipe, ablation: Ablation) -> None:
    """Let the next calls of a pipe run by the rules of `ablation` alone."""
    pipe._runner.ablation = ablation
