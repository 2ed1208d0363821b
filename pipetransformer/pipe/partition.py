"""Groups the layers of a Sequential and places the groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


def partition_model(
    module: nn.Sequential,
    balance: Sequence[int],
    devices: Sequence[torch.device | str | int] | None = None,
) -> nn.Sequential:
    """Make a Sequential of Sequentials, each on its device.

    Args:
        module: The layers; they are moved, not copied.
        balance: Number of layers of each group, at least 1; in sum all of them.
        devices: One per group, spare ones are left alone; None: accelerator k for
            group k.

    Returns:
        One Sequential per group, in the order of the layers.

    Raises:
        ValueError: if ``balance`` or ``devices`` does not fit.
    """
    if min(balance, default=1) < 1 or sum(balance) != len(module):
        raise ValueError(
            f"balance: expected positive numbers with the sum {len(module)}, got "
            f"{list(balance)}"
        )
    places = range(len(balance)) if devices is None else devices
    if len(places) < len(balance):
        raise ValueError(
            f"devices: expected one per group ({len(balance)}), got {len(places)}"
        )
    layers = iter(module)
    return nn.Sequential(
        *(
            nn.Sequential(*itertools.islice(layers, size)).to(place)
            for size, place in zip(balance, places, strict=False)
        )
    )
