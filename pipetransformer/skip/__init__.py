"""Room ``skip``: tensors that go past the layers in between, from stash to pop."""

from pipetransformer.skip.layout import Lane, inspect_lanes, skip_pairs
from pipetransformer.skip.messages import pop, stash
from pipetransformer.skip.namespace import Namespace
from pipetransformer.skip.tracker import SkipTracker, use_skip_tracker
from pipetransformer.skip.verify import verify_skippables
from pipetransformer.skip.wrapper import Skippable, skippable

__all__ = [
    "Lane",
    "Namespace",
    "SkipTracker",
    "Skippable",
    "inspect_lanes",
    "pop",
    "skip_pairs",
    "skippable",
    "stash",
    "use_skip_tracker",
    "verify_skippables",
]
