"""Stands for ``torch.distributed.pipeline.sync.skip.skippable``, the module.

In the package that name is the decorator. So that a path through it works as well,
the decorator has the names of the module.
"""

from pipetransformer.pipe.skip import (
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]

for _value in (Skippable, pop, skippable, stash, verify_skippables):
    setattr(skippable, _value.__name__, _value)
