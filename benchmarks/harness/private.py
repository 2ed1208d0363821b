"""The only way of benchmarks into what an engine keeps to itself."""

from __future__ import annotations

from torch import nn

import pipetransformer as pt
from pipetransformer.run.context import Run


def run_of(engine: pt.PipeTransformer) -> Run:
    """Return the run of an engine that was opened."""
    return engine._open().run


def model_of(engine: pt.PipeTransformer) -> nn.Sequential:
    """Return the plain model on the host, whose layers every replica shares."""
    return engine._arguments.model
