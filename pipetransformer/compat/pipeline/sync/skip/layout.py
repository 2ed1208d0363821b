"""Stands for ``torch.distributed.pipeline.sync.skip.layout``."""

from pipetransformer.skip.layout import SkipLayout, inspect_skip_layout

__all__ = ["SkipLayout", "inspect_skip_layout"]
