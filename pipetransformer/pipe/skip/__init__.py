"""Skip connections: tensors that go past the layers in between."""

from pipetransformer.pipe.skip.messages import pop, stash
from pipetransformer.pipe.skip.namespace import Namespace
from pipetransformer.pipe.skip.verify import verify_skippables
from pipetransformer.pipe.skip.wrapper import Skippable, skippable

__all__ = [
    "Namespace",
    "Skippable",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
