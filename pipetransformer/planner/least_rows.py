"""How many rows a micro-batch must have for the layers that it passes."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def least_rows(module: nn.Module, *, as_found: bool = False) -> int:
    """Return how many rows a module in train mode may need: batch norms need two.

    They divide by the values of a channel less one, and an input ``(rows, channels)``
    has one value per row.

    Args:
        module: A layer or a model.
        as_found: It runs in the mode it is in, and a batch norm in eval mode takes
            one row. Otherwise it is judged as if all of it were in train mode, into
            which plans put layers that they thaw.
    """
    norms = (m for m in module.modules() if isinstance(m, _BatchNorm))
    return 2 if any(norm.training or not as_found for norm in norms) else 1
