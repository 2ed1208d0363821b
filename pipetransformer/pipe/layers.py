"""The layers of all stages, seen as one sequence."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, cast

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

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` of a pipeline with the same cuts gave.

        Raises:
            RuntimeError: as of ``nn.Module``; where only the names are others, it says
                what renames them.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            own = self.state_dict()
            if len(own) != len(state_dict) or own.keys() == state_dict.keys():
                raise
            raise RuntimeError(
                f"{error}\n\tThe state has as many entries under other names. That of "
                "the plain model: load from_plain_state_dict(pipe, state). That of a "
                "pipeline with other cuts: load it into one with the same cuts around "
                "this model, Pipe(partition_model(model, balance, devices))."
            ) from None

    def _stages(self) -> list[PipeSequential]:
        return cast("list[PipeSequential]", list(self.partitions))
