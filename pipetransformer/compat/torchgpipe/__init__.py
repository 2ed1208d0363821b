"""torchgpipe's interface; also ``import torchgpipe`` after ``install``."""

from pipetransformer.compat.torchgpipe.version import __version__ as __version__
from pipetransformer.pipe import GPipe, is_checkpointing, is_recomputing

# The version is an attribute, though no part of the old list.
__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]
