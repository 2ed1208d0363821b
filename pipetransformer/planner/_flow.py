"""What goes from layer to layer: a value, and the skip tensors that go past layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor, nn

from pipetransformer.core.containers import map_tensors
from pipetransformer.planner import _values
from pipetransformer.planner._stopwatch import Stopwatch
from pipetransformer.skip import Namespace, Skippable, SkipTracker, use_skip_tracker

Key: TypeAlias = "tuple[Namespace | None, str]"


@dataclasses.dataclass(frozen=True)
class Flow:
    """What a layer takes, what it gives, or what there is between two layers.

    Args:
        value: arguments, or what was returned.
        skips: tensors that are stashed and not popped yet.
        spreads: a mapping holds a layer's keywords, as the model's inputs do; between
            layers it is one argument.
    """

    value: object
    skips: Mapping[Key, Tensor | None] = dataclasses.field(default_factory=dict)
    spreads: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the value, then the skips."""
        yield from _values.tensors(self.value)
        yield from _values.tensors(self.skips)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Flow:
        """Return the flow with ``fn`` applied to its tensors."""
        skips = {
            key: None if skip is None else fn(skip) for key, skip in self.skips.items()
        }
        return Flow(map_tensors(self.value, fn), skips, self.spreads)

    def at(self, layer: nn.Module) -> Flow:
        """Return what of this the layer takes: the value, and the skips it pops."""
        keys = [
            key
            for part in layer.modules()
            if isinstance(part, Skippable)
            for key in part.poppable()
        ]
        popped = {k: self.skips[k] for k in keys if k in self.skips}
        return Flow(self.value, popped, self.spreads)

    def after(self, layer: nn.Module, given: Flow) -> Flow:
        """Return what there is behind the layer, of which ``given`` comes from it."""
        taken = self.at(layer).skips
        passing = {k: skip for k, skip in self.skips.items() if k not in taken}
        return Flow(given.value, {**passing, **given.skips})


def call(layer: nn.Module, taken: Flow) -> Flow:
    """Call a layer with what it takes; return what it gives, its stashes included."""
    return timed_call(lambda fn: (0, fn()), layer, taken)[1]


def timed_call(watch: Stopwatch, layer: nn.Module, taken: Flow) -> tuple[int, Flow]:
    """The same, with the nanoseconds of the call alone."""
    tracker = SkipTracker()
    for (namespace, name), skip in taken.skips.items():
        tracker.save(namespace, name, skip)
    with use_skip_tracker(tracker):
        spent_ns, value = watch(lambda: _call(layer, taken))
    _values.check_returned(type(layer).__name__, value)
    return spent_ns, Flow(value, tracker.load_all())


def _call(layer: nn.Module, taken: Flow) -> object:
    """Call a layer as the pipeline does: a tuple or list gives positions."""
    value = taken.value
    if taken.spreads and isinstance(value, Mapping):
        return layer(**value)
    if isinstance(value, (tuple, list)):
        return layer(*value)
    return layer(value)
