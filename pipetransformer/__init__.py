"""Elastic pipelined fine-tuning of ``nn.Sequential`` models."""

from pipetransformer._extension import load as _load

_load()

__version__ = "0.1.0"
__all__: list[str] = []
