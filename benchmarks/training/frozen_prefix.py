"""Freezing and a cache for a plain DDP loop: what a user could write in an evening.

Front layers stop training; what they make of each sample is kept and read in the
passes that follow; DDP is wrapped anew around the layers that are left. Plain torch:
nothing of ``pipetransformer`` is used.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def frozen_units(alpha: float, num_units: int, epoch: int) -> int:
    """Return how many units the paper's cap has frozen after `epoch` epochs."""
    return math.ceil(num_units * (1 - (1 - alpha) ** epoch) - 1e-9)


class FrozenPrefix:
    """The frozen layers of a model, and their outputs by sample.

    In each pass every sample comes once, in a batch of one process. So at its end all
    of a set's samples are kept as they leave the boundary, and the next pass, whose
    shuffle gives them to other processes, can read them all: the processes of the
    machine share the memory.

    Args:
        model: All layers. The outputs of all frozen layers must have one shape.
        sizes: Samples of each set, by name.
    """

    def __init__(self, model: nn.Sequential, sizes: dict[str, int]) -> None:
        self._model = model
        self._sizes = sizes
        self._kept: dict[str, Tensor] = {}  # set -> outputs by sample
        self._depths = dict.fromkeys(sizes, 0)  # layers that these have passed
        self.boundary = 0

    def freeze(self, boundary: int) -> DistributedDataParallel:
        """Freeze the layers before `boundary` and return the others in DDP."""
        for parameter in self._model[:boundary].parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        self.boundary = boundary
        return DistributedDataParallel(
            self._model[boundary:], gradient_as_bucket_view=True
        )

    @torch.no_grad()
    def __call__(self, name: str, ids: Tensor, inputs: Tensor) -> Tensor:
        """Return what the first active layer gets for these samples of a set."""
        depth = self._depths[name]
        hidden = self._kept[name][ids] if depth else inputs
        if depth < self.boundary:
            hidden = self._model[depth : self.boundary](hidden)
            if name not in self._kept:  # the first batch of a pass, in every process
                self._kept[name] = self._share(name, hidden)
            self._kept[name][ids] = hidden
        return hidden

    def end_pass(self, name: str) -> None:
        """Note that every sample of a set has been seen once."""
        self._depths[name] = self.boundary

    def kept(self, name: str) -> bool:
        """Tell whether this pass over a set reads what was kept."""
        return self._depths[name] > 0

    def _share(self, name: str, like: Tensor) -> Tensor:
        """Return memory for a whole set that all processes here see."""
        path = Path("/dev/shm") / f"frozen-{os.environ['MASTER_PORT']}-{name}"
        shape = (self._sizes[name], *like.shape[1:])
        memory = torch.from_file(
            str(path), shared=True, size=math.prod(shape), dtype=like.dtype
        )
        dist.barrier()  # all have opened it
        path.unlink(missing_ok=True)  # it goes with the last process
        return memory.view(shape)
