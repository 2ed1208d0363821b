"""The layers of all stages, seen as one sequence."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import cast

from torch import nn

from pipetransformer.pipe.stage import PipeSequential


class StageLayers(nn.Module):
    """A module of stages that has the length, index and order of its layers.

    Attributes:
        partitions: The stages.
    """

    partitions: nn.ModuleList

    @property
    def num_stages(self) -> int:
        """Number of stages, K."""
        return len(self.partitions)

    def __len__(self) -> int:
        """Number of layers over all stages."""
        return sum(len(stage) for stage in self._stages())

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers of all stages."""
        for stage in self._stages():
            yield from stage

    def __getitem__(self, index: int) -> nn.Module:
        """Return the layer at an index; a negative one counts from the end.

        Raises:
            TypeError: if ``index`` is no integer, such as a slice.
            IndexError: if there is no such layer.
        """
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(
                f"layer index: expected an integer, got {type(index).__name__}"
            ) from None
        layers = list(self)
        if not -len(layers) <= position < len(layers):
            raise IndexError(
                f"layer index: expected one of {len(layers)} layers, got {position}"
            )
        return layers[position]

    def _stages(self) -> list[PipeSequential]:
        return cast("list[PipeSequential]", list(self.partitions))
