"""What the user holds: the facade, its start and its end."""

from pipetransformer.engine.facade import PipeTransformer

__all__ = ["PipeTransformer"]
