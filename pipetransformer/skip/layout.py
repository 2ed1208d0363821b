"""Which skip tensors cross from one stage to a later one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from pipetransformer.skip.namespace import Namespace
from pipetransformer.skip.wrapper import Skippable


@dataclasses.dataclass(frozen=True)
class Lane:
    """The way of one skip tensor past the stages in between.

    Args:
        namespace: Namespace of the name.
        name: The name it is stashed under.
        source: Stage that stashes it.
        destination: Stage that pops it, later than ``source``.
    """

    namespace: Namespace | None
    name: str
    source: int
    destination: int


def inspect_lanes(stages: Sequence[nn.Module]) -> tuple[Lane, ...]:
    """Find the skip tensors that cross stages.

    Args:
        stages: The stages in order, or the layers, each taken as a stage; skippable
            layers count at any depth. Names fit together (`verify_skippables`).

    Returns:
        One lane per pair that crosses, in the order of the stashes.
    """
    destinations = {
        key: j for j, layer in _skippables(stages) for key in layer.poppable()
    }
    pops = {(key, j) for j, layer in _skippables(stages) for key in layer.poppable()}
    lanes = []
    for j, layer in _skippables(stages):
        for key in layer.stashable():
            destination = destinations.get(key, j)
            # Several modules may have pairs of one name, each within itself.
            if destination > j and (key, j) not in pops:
                lanes.append(Lane(*key, source=j, destination=destination))
    return tuple(lanes)


def skip_pairs(layers: Sequence[nn.Module]) -> tuple[tuple[int, int], ...]:
    """Find the layers that belong together: one stashes what the other pops.

    Args:
        layers: The layers in order; their names fit together.

    Returns:
        Indices of the stashing and of the popping layer, in rising order.
    """
    pairs = {(lane.source, lane.destination) for lane in inspect_lanes(layers)}
    return tuple(sorted(pairs))


class SkipLayout:
    """The lanes of a pipeline, looked up from either end.

    Args:
        num_stages: Number of stages.
        lanes: The lanes between them.
    """

    def __init__(self, num_stages: int, lanes: Sequence[Lane]) -> None:
        self.num_stages = num_stages
        self.lanes = tuple(lanes)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether a skip tensor crosses stages."""
        return any((lane.namespace, lane.name) == (ns, name) for lane in self.lanes)

    def copy_policy(self, stage: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """Yield source, namespace and name of what ``stage`` takes from earlier ones.

        Args:
            stage: Index of the popping stage.
        """
        for lane in self.lanes:
            if lane.destination == stage:
                yield lane.source, lane.namespace, lane.name


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Return the skip layout of stages; `inspect_lanes` under its old name."""
    return SkipLayout(len(partitions), inspect_lanes(partitions))


def _skippables(stages: Sequence[nn.Module]) -> Iterator[tuple[int, Skippable]]:
    for j, stage in enumerate(stages):
        for layer in stage.modules():
            if isinstance(layer, Skippable):
                yield j, layer
