"""The one private name of the pipe room that its tests need."""

from pipetransformer.pipe._binding import gpipe_order_text

__all__ = ["gpipe_order_text"]
